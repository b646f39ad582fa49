"""An engine of somebody else that is started anew answers nobody before it is proven, with the database or without."""

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
import yaml

from tests.doubles import postgres
from tests.loop.harness.bare_engine import MODEL, attached_to, engine_on
from tests.loop.harness.oracle import Oracle
from tests.loop.harness.services import (
    Service,
    free_port,
    ledger_of,
    stage_by_hand,
    wait_for,
    wait_until_served,
    write_settings,
)

pytestmark = [pytest.mark.vllm, pytest.mark.postgres, pytest.mark.soak]

_BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "once upon a time"}],
    "max_tokens": 8,
    "temperature": 1.0,
    "logprobs": True,
    "return_token_ids": True,
    "ignore_eos": True,
}
#: For so long users go on asking after the engine has come back.
_ASK_S = 20.0


def outcome(service: Service, oracles: Mapping[str, Oracle]) -> str:
    """What became of a request: its status, or the version that answered, and whether it was that."""
    try:
        reply = httpx.post(f"{service.url}/v1/chat/completions", json=_BODY, timeout=60)
    except httpx.TransportError as error:
        return type(error).__name__
    if reply.status_code != 200:
        return str(reply.status_code)
    version, answer = reply.headers["x-tuneloop-version"], reply.json()
    [choice] = answer["choices"]
    found = [each["logprob"] for each in choice["logprobs"]["content"]]
    expected = oracles[version].logprobs(answer["prompt_token_ids"], choice["token_ids"])
    far = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    return f"version {version}, {'right' if far < 1e-3 else f'{far:.3f} nats off'}"


def settings_file(folder: Path, model: Path, database: str, engine: httpx.Client) -> Path:
    buffer = {"trainer_input": {"experience_buffer": {"path": database}}}
    config = write_settings(folder, model, mode="serve", buffer=buffer)
    values = yaml.safe_load(config.read_text())
    values["model"]["served_model_name"] = MODEL
    values["explorer"] |= {"request_timeout": 5, "rollout_model": attached_to(engine)}
    config.write_text(yaml.safe_dump(values))
    return config


@pytest.mark.parametrize("database_goes", [False, True], ids=["database there", "database away"])
def test_no_reply_is_of_other_weights_than_it_says(
    model: Path, tmp_path_factory: pytest.TempPathFactory, database_goes: bool
) -> None:
    folder, port, server = tmp_path_factory.mktemp("restarted"), free_port(), postgres.started()
    before, after = Counter[str](), Counter[str]()
    try:
        with engine_on(port, tmp_path_factory.mktemp("first"), model) as engine:
            service = Service(settings_file(folder, model, server.url, engine), "explorer")
            service.wait_until_ready()
            ledger = ledger_of(service.settings)
            new = stage_by_hand(service.settings, ledger, 7)()
            wait_until_served(ledger, new)
            ledger.close()
            weights = {"0": Oracle(model), "1": Oracle(service.settings.job_dir / "global_step_1" / "actor")}
            before.update(outcome(service, weights) for _ in range(5))
            if database_goes:
                server.stop()
        with engine_on(port, tmp_path_factory.mktemp("second"), model):
            until = time.monotonic() + _ASK_S
            while time.monotonic() < until:
                after[outcome(service, weights)] += 1
            if database_goes:
                server.start()
            wait_for(lambda: outcome(service, weights) == "version 1, right", timeout_s=120, why=f"after {after}")
        assert service.stop() == 0
    finally:
        server.close()
    assert before == {"version 1, right": 5}
    assert not [each for each in after if "off" in each or each.startswith("version 0")], after
