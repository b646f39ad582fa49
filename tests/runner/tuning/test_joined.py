"""A service that is joined, and trains otherwise than tune() was told."""

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.doubles.serving import serving
from tests.explorer.running import RunningExplorer
from tests.runner.tuning.service_double import MODEL, ServiceDouble
from tuneloop.runner import AlgorithmConfig, TinkerConfig, TuneRefused, TunerModelConfig, WorkflowOutput, tune

CONFIGURED = {
    "algorithm_type": "multi_step_grpo",
    "learning_rate": 1e-5,
    "group_size": 2,
    "train_batch_size": 1024,
    "batch_timeout": 0.2,
    "save_interval": 1,
    "model": "Qwen3-0.6B",
    "max_model_len": 4096,
    "lora_rank": None,
}
ASKED = AlgorithmConfig(group_size=2, batch_size=2, learning_rate=1e-5)


async def ask(task: Any, model: AsyncOpenAI) -> WorkflowOutput:
    await model.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["question"]}])
    return WorkflowOutput(reward=1.0)


class Said(list[str]):
    """A view that keeps the sentences."""

    def say(self, sentence: str) -> None:
        self.append(sentence)

    def run_ended(self, *_: Any, **__: Any) -> None:
        pass

    step = evaluation = run_ended


def go(folder: Path, configured: dict[str, Any], **given: Any) -> list[str]:
    """What was said of the service."""
    double = ServiceDouble(configured=CONFIGURED | configured)
    with serving(double) as url:
        said = Said()
        options = {"algorithm": ASKED, "service": url, "checkpoint_root_dir": folder, "view": said, **given}
        tune(workflow_func=ask, train_dataset=[{"question": "1+1"}, {"question": "2+2"}], **options)
    return [each.partition(f"{url} ")[2] for each in said if each.startswith("the service at")]


@pytest.mark.parametrize(
    ("configured", "sentence"),
    [
        ({}, None),
        ({"learning_rate": 1e-6}, "has the learning rate 1e-06: learning_rate 1e-05 has no effect"),
        ({"group_size": 8}, "compares 8 runs of a task (buffer.group_size), and group_size is 2"),
        ({"group_size": None}, "compares no runs of a task"),
        ({"batch_timeout": None}, "waits for 1024 experiences (buffer.train_batch_size), and a step has 4 runs"),
        ({"train_batch_size": 3}, "makes several versions of a step of 4 runs: its buffer.train_batch_size is 3"),
        ({"save_interval": 5}, "publishes every 5th of its steps (trainer.save_interval)"),
    ],
)
def test_what_has_no_effect_there_is_said(tmp_path: Path, configured: dict[str, Any], sentence: str | None) -> None:
    told = go(tmp_path, configured)
    assert len(told) == (sentence is not None)
    assert all(each.startswith(sentence or "") for each in told), told


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (TunerModelConfig("/there/Qwen3-0.6B", max_model_len=4096), None),
        (TunerModelConfig("/there/Qwen3-4B"), "trains Qwen3-0.6B: model_path Qwen3-4B has no effect"),
        (
            TunerModelConfig("Qwen/Qwen3-0.6B", max_model_len=8192),
            "takes 4096 tokens: max_model_len 8192 has no effect",
        ),
    ],
)
def test_another_model_is_said(tmp_path: Path, model: TunerModelConfig, sentence: str | None) -> None:
    assert go(tmp_path, {}, models={"model": model}) == [sentence] * (sentence is not None)


@pytest.mark.parametrize(
    ("configured", "given", "sentence"),
    [
        (
            {"algorithm_type": "ppo"},
            {},
            "trains by ppo, not by multi_step_grpo: say AlgorithmConfig(algorithm_type='ppo')",
        ),
        (
            {},
            {"model": TunerModelConfig("Qwen3-0.6B", tinker_config=TinkerConfig(rank=8))},
            "trains all weights, not an adapter of rank 8",
        ),
        ({"lora_rank": 4}, {"model": TunerModelConfig("Qwen3-0.6B")}, "trains an adapter of rank 4, not all weights"),
    ],
)
def test_something_else_is_not_trained_instead(
    tmp_path: Path, configured: dict[str, Any], given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TuneRefused) as refused:
        go(tmp_path, configured, **given)
    assert sentence in str(refused.value)


def test_the_service_itself_says_how_it_trains(explorer: RunningExplorer, tmp_path: Path) -> None:
    configured = explorer.http.get("/training").json()["configured"]
    assert configured.keys() == CONFIGURED.keys()
    settings = explorer.settings
    assert configured["algorithm_type"] == settings.algorithm.algorithm_type == "ppo"
    assert configured["model"] == settings.model.model_path.name
    with pytest.raises(TuneRefused, match="trains by ppo, not by grpo"):
        tune(
            workflow_func=ask,
            train_dataset=[{"question": "1+1"}],
            algorithm=AlgorithmConfig(algorithm_type="grpo"),
            service=explorer.url,
            checkpoint_root_dir=tmp_path,
        )
