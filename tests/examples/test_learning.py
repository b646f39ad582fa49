"""The benchmark of learning: what is sampled, what is left for the learner, what is kept, and what is drawn."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.learning import ours
from benchmarks.learning.plan import Wanted
from benchmarks.learning.play import Player
from examples.sums.model import save
from examples.tasks.methods import METHODS
from examples.tasks.start import TASKS
from examples.tasks.warmup import build


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A start model that knows nothing."""
    folder = tmp_path_factory.mktemp("learning") / "start" / "sums-0"
    save(*build(0), folder)
    (folder / "warmed_up.json").write_text("{}")
    return folder


def logprobs(network: torch.nn.Module, prompt: list[int], ids: list[int]) -> list[float]:
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(logits.log_softmax(1), ids, strict=True)]


@pytest.mark.parametrize("task", ["sums", "calculator"])
def test_sampled_log_probabilities_are_the_models(task: str) -> None:
    network, words = build(3)
    played = Player(TASKS[task], network, words, seed=0).play(TASKS[task].questions()[100 - 8 : 100])
    for said in (said for run in played for said in run.replies):
        assert np.allclose(said.logprobs, logprobs(network, said.prompt, said.ids), atol=1e-4)
        assert words.eos_token_id not in said.ids[:-1]
        assert 1 <= len(said.ids) <= TASKS[task].max_tokens


def test_a_run_learns_from_the_replies_it_asked_for(base: Path) -> None:
    wanted = Wanted(place="ours", method="reinforce", samples=128, coin=True)
    line = ours.learn(wanted, TASKS["sums"], base)
    assert line["steps"] == 2
    assert [at for at, _ in line["curve"]] == [64, 128]
    assert line["before"] == 0.0


def test_a_run_that_is_taught_asks_its_teacher(base: Path) -> None:
    shutil.copytree(base, base.with_name("sums-0-teacher"))
    line = ours.learn(Wanted(place="ours", method="distill", samples=64), TASKS["sums"], base)
    assert line["steps"] == 1
    assert line["metrics"]["actor/teacher_kl"] == pytest.approx(0.0, abs=1e-5)  # It is itself.


def test_settings_of_a_run_are_the_methods_own_and_the_changes(base: Path) -> None:
    for method in METHODS:
        wanted = Wanted(place="ours", method=method, changes=("optimizer.lr=1e-6",))
        settings = ours.settings_of(wanted, TASKS["sums"], base)
        assert (settings.algorithm.algorithm_type, settings.algorithm.optimizer.lr) == (method, 1e-6)
