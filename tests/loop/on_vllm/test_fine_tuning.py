"""OpenAI's guides of fine-tuning, by OpenAI's client, on a service with its trainer and real engine."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from openai import OpenAI

from tests.loop.harness.services import Service, ledger_of, write_settings
from tuneloop.shared.experience import State

pytestmark = [pytest.mark.vllm, pytest.mark.contract]

QUESTIONS = [f"{one}+{other}=" for one in range(6) for other in range(4)]
LONGEST_S = 300


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = write_settings(tmp_path_factory.mktemp("jobs"), model)
    values = yaml.safe_load(config.read_text())
    values["model"]["lora"] = {"rank": 4}
    values["algorithm"] = {"algorithm_type": "reinforce", "optimizer": {"lr": 0.01}}
    config.write_text(yaml.safe_dump(values))
    service = Service(config, "both")
    service.wait_until_ready()
    yield service
    assert service.stop() == 0


@pytest.fixture
def client(service: Service) -> OpenAI:
    return OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=120.0)


def ask(client: OpenAI, model: str) -> Any:
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTIONS[0]}], max_tokens=4, temperature=1.0
    )


def done(client: OpenAI, name: str) -> Any:
    ends = time.monotonic() + LONGEST_S
    while (job := client.fine_tuning.jobs.retrieve(name)).status not in {"succeeded", "failed", "cancelled"}:
        assert time.monotonic() < ends, client.fine_tuning.jobs.list_events(name).data
        time.sleep(0.5)
    assert job.status == "succeeded", (job.error, client.fine_tuning.jobs.list_events(name).data)
    return job


def upload(client: OpenAI, lines: list[dict[str, Any]]) -> str:
    text = "\n".join(map(json.dumps, lines)).encode()
    return client.files.create(file=("lines.jsonl", text), purpose="fine-tune").id


def supervised_lines() -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": each}, {"role": "assistant", "content": "7"}]} for each in QUESTIONS
    ]


def dpo_lines() -> list[dict[str, Any]]:
    return [
        {
            "input": {"messages": [{"role": "user", "content": each}]},
            "preferred_output": [{"role": "assistant", "content": "7"}],
            "non_preferred_output": [{"role": "assistant", "content": "5"}],
        }
        for each in QUESTIONS
    ]


def test_supervised_from_upload_to_a_reply_and_on_to_dpo(service: Service, client: OpenAI) -> None:
    name = service.settings.served_model_name
    training, validation = upload(client, supervised_lines()), upload(client, supervised_lines()[:4])
    job = client.fine_tuning.jobs.create(
        model=name,
        training_file=training,
        validation_file=validation,
        suffix="sevens",
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 6}}},
    )
    with pytest.raises(openai.NotFoundError):
        ask(client, f"ft:{name}:sevens:{job.id.removeprefix('ftjob-')}")
    job = done(client, job.id)
    assert job.fine_tuned_model is not None
    assert job.fine_tuned_model.startswith(f"ft:{name}:sevens:")
    assert job.trained_tokens
    reply = ask(client, job.fine_tuned_model)
    assert reply.model == job.fine_tuned_model
    assert job.fine_tuned_model in {each.id for each in client.models.list()}
    checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert [each.step_number for each in checkpoints] == [8, 4]
    losses = [each.metrics.full_valid_loss for each in checkpoints]
    assert losses[0] is not None
    assert losses[1] is not None
    assert losses[0] < losses[1], "the second epoch has learnt, too"
    assert ask(client, checkpoints[1].fine_tuned_model_checkpoint).choices
    events = [each.message for each in client.fine_tuning.jobs.list_events(job.id, limit=100).data]
    assert any("8" in each for each in events)

    later = client.fine_tuning.jobs.create(
        model=job.fine_tuned_model,
        training_file=upload(client, dpo_lines()),
        method={"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 1, "batch_size": 8, "beta": 0.1}}},
    )
    later = done(client, later.id)
    assert later.fine_tuned_model is not None
    assert ask(client, later.fine_tuned_model).choices

    ledger = ledger_of(service.settings)
    jobs = {each.id: each for each in ledger.jobs.page(None)}
    for each in (job, later):
        rows = ledger.policies.in_training(jobs[each.id].policy)
        assert rows == {State.COMMITTED: 0, State.LEASED: 0}
    line = [each for each in ledger.versions.all() if each.policy == jobs[job.id].policy]
    assert sum(each.consumed for each in line) == 2 * len(QUESTIONS)
    assert ledger.versions.newest().version == 0, "the default policy learns nothing of it"
    assert ledger.reports.imbalance() == []
    ledger.close()

    assert client.models.delete(later.fine_tuned_model).deleted
    with pytest.raises(openai.NotFoundError):
        ask(client, later.fine_tuned_model)


def test_reinforcement_by_a_grader(service: Service, client: OpenAI) -> None:
    lines = [{"messages": [{"role": "user", "content": each}], "answer": "7"} for each in QUESTIONS[:8]]
    grader = {
        "type": "text_similarity",
        "name": "sevens",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "evaluation_metric": "fuzzy_match",
    }
    job = client.fine_tuning.jobs.create(
        model=service.settings.served_model_name,
        training_file=upload(client, lines),
        method={
            "type": "reinforcement",
            "reinforcement": {"grader": grader, "hyperparameters": {"n_epochs": 1, "batch_size": 4}},
        },
    )
    job = done(client, job.id)
    assert job.fine_tuned_model is not None
    assert ask(client, job.fine_tuned_model).choices
