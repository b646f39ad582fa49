"""Adapters on real vLLM: what was trained is what is served, beside the champion's and in its place, before and after
the engine dies, and no reply is cut.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.loop.harness.services import (
    GPUS,
    Service,
    command_of,
    descendants,
    ledger_of,
    running,
    wait_for,
    write_settings,
)
from tests.trainer.factories import sample
from tuneloop.explorer.engines.fleet import TrafficSplit
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.versions.versions import VersionState
from tuneloop.shared.settings.serving import LoraSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.publication import Publication

pytestmark = [pytest.mark.vllm, pytest.mark.contract]

#: On GPUs vLLM serves adapters in half precision only.
#: The layers that the engine is told of no adapter for.
LEFT_OUT = "down_proj"

DTYPE, NEAR, FAR = ("bfloat16", 0.15, 0.2) if GPUS else ("float32", 1e-4, 1e-2)


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    algorithm = {"algorithm_type": "reinforce", "optimizer": {"lr": 0.05}}
    config = write_settings(tmp_path_factory.mktemp("adapters"), model, algorithm=algorithm)
    values = yaml.safe_load(config.read_text())
    values["model"]["lora"] = {"rank": 4, "targets": [each for each in LoraSettings().targets if each != LEFT_OUT]}
    values["explorer"]["rollout_model"]["dtype"] = values["trainer"]["dtype"] = DTYPE
    values["rollout"] = {"mode": "canary", "share": 0.5}
    config.write_text(yaml.safe_dump(values))
    with running(config) as service:
        yield service


def publish(settings: Settings, ledger: Ledger, steps: int) -> Path:
    """Train an adapter on made-up replies, and have it tried."""
    version = register(settings, ledger, steps)
    wait_for(lambda: ledger.versions.canary() is not None, timeout_s=120, why=f"version {version} is not tried")
    return CheckpointStore(settings.job_dir).path(version) / "actor"


def register(settings: Settings, ledger: Ledger, steps: int) -> int:
    """Train an adapter on made-up replies, and make a version of it."""
    learner = snapshot.load(settings, None)
    for step in range(steps):
        learner.step([sample(10 * step + each) for each in range(8)])
    epoch = ledger.training.take_epoch("by hand")
    weights, probe = snapshot.weights_of(learner), snapshot.probe(learner, settings)
    store, parent = CheckpointStore(settings.job_dir), ledger.versions.newest().version
    publication = Publication(settings, store, weights, probe, epoch=epoch, parent=parent)
    return publication.register(ledger.training, []).version


def with_lora(settings: Settings, **lora: object) -> Settings:
    """Settings of a trainer whose adapters are made otherwise."""
    model = settings.model.model_dump() | {"lora": settings.model.lora.model_dump() | lora}
    return settings.model_copy(update={"model": type(settings.model).model_validate(model)})


def promote(service: Service, ledger: Ledger, version: int) -> None:
    """Have a version served to all."""
    ledger.versions.promote(version, by="admin:tests", reason="it is right")
    everybody = [someone(version, tried=tried) for tried in (False, True)]
    wait_for(lambda: all(ask(service, user).headers["x-tuneloop-version"] == str(version) for user in everybody))


def someone(version: int, *, tried: bool) -> str:
    """A user whom the version answers while it is tried, or one whom it does not."""
    split = TrafficSplit(version, share=0.5)
    return next(user for user in map(str, range(100)) if split.answers(f"default:{user}") is tried)


def ask(service: Service, user: str = "anybody") -> httpx.Response:
    body = {
        "model": service.settings.served_model_name,
        "messages": [{"role": "user", "content": "once upon a time " * 8}],
        "user": user,
        "max_tokens": 16,
        "temperature": 1.0,
        "logprobs": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    reply = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply


@torch.no_grad()
def distance(service: Service, adapter: Path, user: str = "anybody") -> float:
    """How far what is served to a user lies from what transformers and peft say, in nats."""
    told = ask(service, user).json()
    assert told["model"] == service.settings.served_model_name
    [choice] = told["choices"]
    prompt, ids = told["prompt_token_ids"], choice["token_ids"]
    network = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(service.settings.model.model_path, dtype=torch.float32), adapter
    ).eval()
    logits = network(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    found = torch.tensor([each["logprob"] for each in choice["logprobs"]["content"]])
    return float((found - expected).abs().max())


def test_what_is_trained_is_served_and_a_reply_in_flight_ends_as_it_began(service: Service) -> None:
    settings, ledger = service.settings, ledger_of(service.settings)
    first = publish(settings, ledger, steps=1)
    assert ask(service, someone(1, tried=False)).headers["x-tuneloop-version"] == "0"
    wait_for(lambda: ask(service, someone(1, tried=True)).headers["x-tuneloop-version"] == "1")
    assert distance(service, first, someone(1, tried=True)) < NEAR
    assert distance(service, first, someone(1, tried=False)) > FAR
    promote(service, ledger, 1)
    assert distance(service, first) < NEAR

    begun, lines = threading.Event(), []
    body = {"model": settings.served_model_name, "prompt": "hello", "max_tokens": 900, "ignore_eos": True}

    def read() -> None:
        url = f"{service.url}/v1/completions"
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=240) as reply:
            lines.append(reply.headers["x-tuneloop-version"])
            for line in reply.iter_lines():
                lines.append(line)
                begun.set()

    reading = threading.Thread(target=read)
    reading.start()
    assert begun.wait(180)
    # Of a base that is coarser than the engine's, which its probe must not show.
    second = publish(with_lora(settings, base_bits=4), ledger, steps=3)
    wait_for(lambda: ask(service, someone(2, tried=True)).headers["x-tuneloop-version"] == "2")
    assert distance(service, first, someone(2, tried=False)) < NEAR
    assert distance(service, second, someone(2, tried=True)) < NEAR
    assert distance(service, first, someone(2, tried=True)) > FAR
    promote(service, ledger, 2)
    assert ask(service).headers["x-tuneloop-attested"] == "fingerprint"
    reading.join()
    assert lines[0] == "1"
    assert lines[-2] == "data: [DONE]"
    assert not [line for line in lines if "tuneloop-adapter" in line or '"error"' in line]
    models = httpx.get(f"{service.url}/v1/models", timeout=60).json()["data"]
    assert [each["id"] for each in models] == [settings.served_model_name]

    kill_engine(service)
    answered = wait_for(lambda: version_of(service), timeout_s=240, why="the engine did not come back")
    assert answered == "2"
    assert distance(service, second) < NEAR
    assert ledger.reports.imbalance() == []
    ledger.close()


def test_an_adapter_that_the_engine_adds_to_no_layer_is_not_served_as_the_base(service: Service) -> None:
    """vLLM loads it without an error, and answers as without it."""
    ledger = ledger_of(service.settings)
    served = ledger.versions.champion().version
    version = register(with_lora(service.settings, targets=(LEFT_OUT,)), ledger, steps=3)
    wait_for(lambda: ledger.versions.all()[version].state is VersionState.REJECTED, timeout_s=240)
    assert "engine" in str(ledger.versions.all()[version].reason), ledger.versions.all()[version].reason
    assert ask(service).headers["x-tuneloop-version"] == str(served)
    ledger.close()


def kill_engine(service: Service) -> None:
    for pid in descendants(service.process.pid):
        words = command_of(pid)
        if "vllm.entrypoints.openai.api_server" in words and "tuneloop.explorer.engines.guard" not in words:
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError("there is no engine")


def version_of(service: Service, model: str | None = None) -> str | None:
    """The version that answers now; None if none does."""
    try:
        body = {"model": model or service.settings.served_model_name, "prompt": "hello", "max_tokens": 1}
        reply = httpx.post(f"{service.url}/v1/completions", json=body, timeout=120)
    except httpx.TransportError:
        return None
    return reply.headers["x-tuneloop-version"] if reply.status_code == 200 else None
