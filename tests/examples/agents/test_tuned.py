"""The examples' main(), with a tune() that runs the workflow on a few tasks and trains nothing."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from openai import AsyncOpenAI
from oracle import Oracle, serving

import examples.email_search.main as email_search
import examples.math_agent.main as math_agent
import examples.werewolf.main as werewolf
from examples.email_search.world import Mailbox
from examples.math_agent.world import Problems
from examples.tasks.dialogue import Task
from examples.werewolf.world import Wolves
from tuneloop.runner.models.run import Run
from tuneloop.runner.tuning.config import check_judge_function, check_workflow_function

EXAMPLES = [(math_agent, Problems()), (email_search, Mailbox()), (werewolf, Wolves())]


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    names = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in names}


class Tuned:
    """Stands in for tune(): `given` is what it was called with."""

    def __init__(self, url: str, tasks: Sequence[dict[str, Any]]) -> None:
        self._url, self._tasks = url, tasks
        self.given: dict[str, Any] = {}
        self.rewards: list[float] = []

    def __call__(self, **given: Any) -> Any:
        self.given = given
        check_workflow_function(given["workflow_func"])
        check_judge_function(given["judge_func"])
        metrics = [asyncio.run(self._run(number, task)) for number, task in enumerate(self._tasks)]
        means = {name: sum(each[name] for each in metrics) / len(metrics) for name in metrics[0]}
        reward = SimpleNamespace(mean=sum(self.rewards) / len(self.rewards), count=len(metrics))
        evaluations = [SimpleNamespace(step=step, reward=reward, metrics=means, failed=0) for step in (0, 2)]
        history = [SimpleNamespace(step=1, reward=reward, seconds=1.0)]
        return SimpleNamespace(
            steps=2, version=2, evaluations=evaluations, history=history, failures={}, folder=Path("there")
        )

    async def _run(self, number: int, task: dict[str, Any]) -> dict[str, float]:
        run = Run(service=self._url, task_id=f"task-{number}", run_id="0")
        async with AsyncOpenAI(base_url=run.base_url, api_key="none") as model:
            workflow, judge = self.given["workflow_func"], self.given["judge_func"]
            output = await workflow(**accepted(workflow, {"task": task, "model": model, "run": run}))
        verdict = judge(**accepted(judge, {"task": task, "response": output.response}))
        self.rewards.append(verdict.reward)
        return dict(verdict.metrics)


def run_main(example: ModuleType, world: Task, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Tuned:
    """main() with a model that is there already."""
    tasks = list(world.questions()[:6])
    oracle = Oracle(world, tasks)
    with serving(oracle) as url:
        tuned = Tuned(url, tasks)
        monkeypatch.setattr(example, "tune", tuned)
        example.main(["--dir", str(folder), "--model", "there", "--steps", "2", "--held-out", "8", *arguments])
    return tuned


@pytest.mark.parametrize("gpu", [False, True])
def test_the_settings_of_an_example_are_settings_of_the_services(
    gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = run_main(math_agent, Problems(), tmp_path, monkeypatch, *(["--gpu"] if gpu else []))
    settings = tuned.given["settings"]
    assert settings["cluster"]["gpu_per_node"] == int(gpu)
    assert settings["model"]["served_model_name"] == "math_agent"
    assert settings["explorer"]["rollout_model"].get("enforce_eager", False) is not gpu
