"""Policies on real vLLM: what each has learnt is what it answers with, and nothing of one is another's."""

import re
import threading
import time
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.loop.harness.services import GPUS, Service, client_of_engine, ledger_of, wait_for, write_settings
from tests.loop.on_vllm.test_adapters import kill_engine, version_of
from tests.outboxes import exchanges_in
from tests.trainer.factories import sample
from tuneloop.shared.checkpoints import ACTOR, CheckpointStore
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.versions.versions import VersionState
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.publication import Publication

pytestmark = [pytest.mark.vllm, pytest.mark.contract]

DTYPE, NEAR, FAR = ("bfloat16", 0.15, 0.2) if GPUS else ("float32", 1e-4, 1e-2)

#: How long the first reply of a policy may take whose adapter is not loaded.
FIRST_REPLY_S = 10.0


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    algorithm = {"algorithm_type": "reinforce", "optimizer": {"lr": 0.05}}
    config = write_settings(tmp_path_factory.mktemp("policies"), model, algorithm=algorithm)
    values = yaml.safe_load(config.read_text())
    values["model"]["lora"] = {"rank": 4, "resident": 2}
    values["explorer"]["rollout_model"]["dtype"] = values["trainer"]["dtype"] = DTYPE
    config.write_text(yaml.safe_dump(values))
    service = Service(config, "explorer")
    service.wait_until_ready()
    yield service
    assert service.stop() == 0


@pytest.fixture
def ledger(service: Service) -> Iterator[Ledger]:
    ledger = ledger_of(service.settings)
    yield ledger
    assert ledger.reports.imbalance() == []
    ledger.close()


def publish(service: Service, ledger: Ledger, policy: int, steps: int) -> int:
    """A version of a policy, trained on made-up replies, that answers."""
    settings, line = service.settings, ledger.versions.of(policy)
    learner = snapshot.load(settings, None)
    for step in range(steps):
        learner.step([sample(10 * step + each) for each in range(8)])
    epoch, parent = ledger.training.take_epoch("by hand"), line.newest().version
    weights, probe = snapshot.weights_of(learner), snapshot.probe(learner, settings)
    store = CheckpointStore(settings.job_dir)
    publication = Publication(settings, store, weights, probe, epoch=epoch, parent=parent, policy=policy)
    version = publication.register(ledger.training, []).version
    wait_for(lambda: line.champion().version == version, timeout_s=240, why=f"version {version} is not served")
    return version


def ask(service: Service, name: str, text: str = "once upon a time", **but: Any) -> httpx.Response:
    body = {
        "model": name,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 16,
        "temperature": 1.0,
        "logprobs": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    reply = httpx.post(f"{service.url}/v1/chat/completions", json=body | but, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply


@torch.no_grad()
def distance(service: Service, prompt: list[int], ids: list[int], logprobs: list[float], adapter: Path | None) -> float:
    """How far log-probabilities lie from what transformers and peft say, in nats."""
    network: Any = AutoModelForCausalLM.from_pretrained(service.settings.model.model_path, dtype=torch.float32)
    network = (PeftModel.from_pretrained(network, adapter) if adapter else network).eval()
    logits = network(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return float((torch.tensor(logprobs) - expected).abs().max())


def hits(service: Service) -> float:
    """Tokens that the engine found in its prefix cache."""
    with client_of_engine(service) as engine:
        told = re.findall(r"^vllm:prefix_cache_hits_total(?:{.*})? (\S+)$", engine.get("/metrics/").text, re.MULTILINE)
    return sum(map(float, told))


def test_each_policy_answers_with_what_it_has_learnt(service: Service, ledger: Ledger) -> None:
    policies = {name: ledger.policies.create(name, by="tests").id for name in ("one", "two", "three")}
    versions = {name: publish(service, ledger, policies[name], steps) for name, steps in (("one", 1), ("two", 3))}
    actors = {name: CheckpointStore(service.settings.job_dir).path(number) / ACTOR for name, number in versions.items()}
    before = {each.msg_id for each in exchanges_in(service.settings.outbox_dir)}
    for name, number in versions.items():
        reply = ask(service, name)
        assert (reply.headers["x-tuneloop-version"], reply.headers["x-tuneloop-policy"]) == (str(number), name)
        assert reply.headers["x-tuneloop-attested"] == "fingerprint"
        assert reply.json()["model"] == name
    assert ask(service, "three").headers["x-tuneloop-policy"] == "three"
    assert ask(service, service.settings.served_model_name).headers["x-tuneloop-version"] == "0"
    rows = [each for each in exchanges_in(service.settings.outbox_dir) if each.msg_id not in before]
    assert [each.policy for each in rows] == [*policies.values(), 0]
    for row, adapter in zip(rows, (actors["one"], actors["two"], None, None), strict=True):
        [found] = row.experiences
        prompt, ids = (list(array("i", each)) for each in (found.prompt_ids, found.completion_ids))
        logprobs = list(array("f", found.logprobs))
        for other in (*actors.values(), None):
            off = distance(service, prompt, ids, logprobs, other)
            assert off < NEAR if other == adapter else off > FAR, (row.policy, other, off)


def test_no_policy_finds_what_another_has_read_in_the_prefix_cache(service: Service, ledger: Ledger) -> None:
    text = "a story that nobody has told before " * 12
    ask(service, "one", text)
    for name, finds in (("two", False), ("three", False), ("one", True), ("two", True)):
        before = hits(service)
        ask(service, name, text)
        assert (hits(service) > before) is finds, name


def test_one_is_rolled_back_while_another_answers(service: Service, ledger: Ledger) -> None:
    policies = {each.name: each.id for each in ledger.policies.all()}
    line = ledger.versions.of(policies["one"])
    first, second = line.champion().version, publish(service, ledger, policies["one"], steps=2)
    wait_for(lambda: ask(service, "one").headers["x-tuneloop-version"] == str(second))
    begun, lines = threading.Event(), []

    def read() -> None:
        body = {"model": "two", "prompt": "hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=240) as reply:
            for each in reply.iter_lines():
                lines.append(each)
                begun.set()

    reading = threading.Thread(target=read)
    reading.start()
    assert begun.wait(180)
    line.roll_back(second, by="tests", reason="it is worse")
    wait_for(lambda: ask(service, "one").headers["x-tuneloop-version"] == str(first))
    still = reading.is_alive()
    reading.join()
    assert lines[-2] == "data: [DONE]"
    assert not [each for each in lines if "tuneloop-adapter" in each or '"error"' in each]
    assert still or len(lines) > 900


def test_an_adapter_that_made_room_is_loaded_again_when_it_is_asked(service: Service, ledger: Ledger) -> None:
    policies = {each.name: each.id for each in ledger.policies.all()}
    number = publish(service, ledger, policies["three"], steps=4)
    actor = ledger.versions.of(policies["three"]).champion().path / ACTOR
    ask(service, "one"), ask(service, "two")
    seconds = []
    for name in ("three", "one", "two", "three"):
        began = time.monotonic()
        reply = ask(service, name)
        seconds.append(round(time.monotonic() - began, 2))
        assert reply.headers["x-tuneloop-policy"] == name
    print("first replies of adapters that were not loaded:", seconds)  # noqa: T201
    assert max(seconds) < FIRST_REPLY_S
    told = reply.json()
    [choice] = told["choices"]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert reply.headers["x-tuneloop-version"] == str(number)
    assert distance(service, told["prompt_token_ids"], choice["token_ids"], logprobs, actor) < NEAR
    assert ledger.versions.of(policies["three"]).champion().state is VersionState.CHAMPION


def test_after_the_engines_end_policies_answer_with_their_versions_again(service: Service, ledger: Ledger) -> None:
    policies = {each.name: each.id for each in ledger.policies.all()}
    kill_engine(service)
    for name in ("one", "two", "three"):
        champion = ledger.versions.of(policies[name]).champion()
        answered = wait_for(partial(version_of, service, name), timeout_s=240, why="the engine did not come back")
        assert answered == str(champion.version)
        told = (reply := ask(service, name)).json()
        [choice] = told["choices"]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        off = distance(service, told["prompt_token_ids"], choice["token_ids"], logprobs, champion.path / ACTOR)
        assert (off < NEAR, reply.headers["x-tuneloop-attested"]) == (True, "fingerprint")
