"""tune() on policies of a service that answers its users meanwhile: two sides of a game, each trained apart."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import AsyncOpenAI

from tests.loop.harness.services import Service, ledger_of, write_settings
from tuneloop.runner import AlgorithmConfig, WorkflowOutput, tune
from tuneloop.runner.errors import TuneRefused
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.export import Selection

pytestmark = [pytest.mark.vllm, pytest.mark.contract]

STEPS = AlgorithmConfig(algorithm_type="reinforce", group_size=2, batch_size=2, learning_rate=1e-3)
KEY = "the-key-of-the-administrator"
HEADERS = {"Authorization": f"Bearer {KEY}"}
REWARDS = {"wolves": 1.0, "villagers": -1.0}


async def play(task: Mapping[str, Any], model: AsyncOpenAI, auxiliary_models: Mapping[str, Any]) -> WorkflowOutput:
    for name, player in auxiliary_models.items():
        messages = [{"role": "user", "content": f"{name}: {task['question']}"}]
        await player.chat.completions.create(model=player.model_name, messages=messages)
    return WorkflowOutput(reward=REWARDS)


def test_two_sides_are_tuned_on_policies_of_a_service_in_production(model: Path, tmp_path: Path) -> None:
    config = write_settings(tmp_path, model)
    values = yaml.safe_load(config.read_text())
    values["model"]["lora"] = {"rank": 4}
    values["explorer"]["admin_key"] = KEY
    config.write_text(yaml.safe_dump(values))
    service = Service(config, "both")
    service.wait_until_ready()
    over, asked = threading.Event(), list[int]()

    def use() -> None:
        body = {"model": service.settings.served_model_name, "messages": [{"role": "user", "content": "hello"}]}
        while not over.is_set():
            asked.append(
                httpx.post(f"{service.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=120).status_code
            )

    users = threading.Thread(target=use)
    users.start()
    try:
        result = tune(
            workflow_func=play,
            train_dataset=[{"question": f"{n}+1"} for n in range(4)],
            algorithm=STEPS,
            service=dict.fromkeys(REWARDS, service.url),
            api_key=KEY,
            policy={"wolves": "wolves", "villagers": "villagers"},
            checkpoint_root_dir=tmp_path / "tune",
            evaluate_before=False,
        )
        assert result.steps == 2
        ledger = ledger_of(service.settings)
        policies = {each.name: each for each in ledger.policies.all()}
        for name, reward in REWARDS.items():
            of = policies[name].id
            line = [each for each in ledger.versions.all() if each.policy == of]
            assert [(each.step, each.consumed) for each in line] == [(0, 0), (1, 4), (2, 4)]
            told = httpx.get(f"{service.url}/training", params={"policy": name}, headers=HEADERS, timeout=60).json()
            assert (told["step"], told["settled"], told["served"]) == (2, True, told["newest"])
            page = ledger.exports.replies(Selection("default", (State.TRAINED,)))
            rows = [row for part in page for row in part if (row.task_id or "").endswith(f"@{name}")]
            assert len(rows) == 8
            assert {row.reward for row in rows} == {reward}
        assert ledger.versions.newest().version == 0
        assert httpx.get(f"{service.url}/training", headers=HEADERS, timeout=60).json()["served"] == 0
        assert ledger.policies.promote(policies["wolves"].id, by="a person") > 0
        assert asked
        assert set(asked) == {200}
        ledger.close()
    finally:
        over.set()
        users.join()
        assert service.stop() == 0


def test_a_policy_needs_a_service_to_join(tmp_path: Path) -> None:
    given: dict[str, Any] = {"workflow_func": play, "train_dataset": [{"question": "1"}], "algorithm": STEPS}
    with pytest.raises(TuneRefused, match="policy: a policy is one of a service that runs"):
        tune(**given, policy="wolves", checkpoint_root_dir=tmp_path)
    with pytest.raises(TuneRefused, match="policy: sheep has no URL"):
        tune(**given, service="http://127.0.0.1:9", policy={"sheep": "x"}, checkpoint_root_dir=tmp_path)
