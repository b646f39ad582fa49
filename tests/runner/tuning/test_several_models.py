"""Several models in one run: each is trained by its own service, on its own agent's calls and reward."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.serving import serving
from tests.runner.tuning.service_double import MODEL, ServiceDouble
from tuneloop.runner import AlgorithmConfig, TuneFailed, WorkflowOutput, tune

TASKS = [{"question": f"{n}+1"} for n in range(4)]
STEPS = AlgorithmConfig(group_size=2, batch_size=2)

Pair = dict[str, tuple[str, ServiceDouble]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    wolves, villagers = ServiceDouble(), ServiceDouble()
    with serving(wolves) as one, serving(villagers) as other:
        yield {"wolves": (one, wolves), "villagers": (other, villagers)}


async def ask(model: Any, text: str) -> str:
    reply = await model.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}])
    return reply.choices[0].message.content or ""


async def play(task: Any, model: Any, auxiliary_models: dict[str, Any]) -> WorkflowOutput:
    await ask(model, "1+1")
    for _ in range(2):
        await ask(auxiliary_models["villagers"], task["question"])
    return WorkflowOutput(reward={"wolves": 1.0, "villagers": -0.5})


def test_each_models_calls_are_trained_by_its_own_service(pair: Pair, tmp_path: Path) -> None:
    urls = {name: url for name, (url, _) in pair.items()}
    result = tune(workflow_func=play, train_dataset=TASKS, algorithm=STEPS, service=urls, checkpoint_root_dir=tmp_path)
    for name, calls, reward in (("wolves", 1, 1.0), ("villagers", 2, -0.5)):
        double = pair[name][1]
        assert len(double.calls) == 8
        assert {len(each) for each in double.calls.values()} == {calls}
        assert double.rewards == dict.fromkeys(double.calls, reward)
        assert double.committed == double.calls.keys()
    assert (result.steps, result.version) == (2, 2)


def test_one_model_is_trained_and_the_other_only_asked(pair: Pair, tmp_path: Path) -> None:
    tune(
        workflow_func=play_for_wolves,
        train_dataset=TASKS,
        algorithm=STEPS,
        service=pair["wolves"][0],
        auxiliary_models={"villagers": pair["villagers"][0]},
        checkpoint_root_dir=tmp_path,
    )
    assert len(pair["wolves"][1].rewards) == 8
    assert pair["villagers"][1].rewards == {}
    assert pair["villagers"][1].unbound == 16


async def play_for_wolves(task: Any, model: Any, auxiliary_models: dict[str, Any]) -> WorkflowOutput:
    await play(task, model, auxiliary_models)
    return WorkflowOutput(reward=1.0)


def test_a_reward_for_a_model_that_is_not_there_is_a_failure(pair: Pair, tmp_path: Path) -> None:
    async def misnamed(task: Any, model: Any) -> WorkflowOutput:
        await ask(model, "1+1")
        return WorkflowOutput(reward={"wolfs": 1.0})

    with pytest.raises(TuneFailed, match="no reward"):
        tune(
            workflow_func=misnamed,
            train_dataset=TASKS,
            algorithm=STEPS,
            service={"wolves": pair["wolves"][0]},
            checkpoint_root_dir=tmp_path,
        )
