"""The methods' settings: every one is accepted by tuneloop, for every task."""

import argparse
import random
from pathlib import Path

import pytest

from examples.sums.folder import Folder
from examples.tasks.__main__ import changes, judge_all
from examples.tasks.dialogue import Verdict
from examples.tasks.drive import turns_of
from examples.tasks.methods import METHODS, REINFORCEMENT, nest
from examples.tasks.rating import Rater
from examples.tasks.start import TASKS
from tuneloop.shared.settings.settings import Settings


def settings_of(root: Path, task: str, method: str, *changed: str, gpu: bool = False) -> Settings:
    folder = Folder(root)
    folder.start_afresh().close()
    options = argparse.Namespace(task=task, method=method, seed=1, start=root, gpu=gpu, set=list(changed))
    return folder.write_settings(seed=1, changes=changes(options))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_accepted_for_every_task(tmp_path: Path, task: str, method: str) -> None:
    settings = settings_of(tmp_path, task, method)
    assert settings.algorithm.algorithm_type == method
    assert settings.served_model_name == task
    assert (settings.explorer.rollout_model.tool_call_parser == "hermes") is bool(TASKS[task].tools)
    assert settings.buffer.group_by != "none" or METHODS[method].runs == 1
    assert settings.trainer.device == "cpu"
    teacher = tmp_path / "start" / f"{task}-1-teacher"
    assert settings.algorithm.distill.teacher_path == (teacher if METHODS[method].taught else None)


@pytest.mark.parametrize(("task", "calls"), [("sums", 1), ("tools", 1), ("calculator", 3)])
def test_a_step_compares_as_many_groups_on_every_task(tmp_path: Path, task: str, calls: int) -> None:
    buffer = settings_of(tmp_path, task, "multi_step_grpo").buffer
    assert buffer.train_batch_size / (calls * buffer.group_size) == 8
    assert settings_of(tmp_path, task, "reinforce").buffer.train_batch_size == 64


def test_the_bar_is_about_methods_of_the_table() -> None:
    assert set(REINFORCEMENT) <= set(METHODS)


def test_the_engine_goes_where_the_options_say(tmp_path: Path) -> None:
    for gpu in (False, True):
        settings = settings_of(tmp_path, "tools", "ppo", gpu=gpu)
        assert (settings.cluster.gpu_per_node, settings.trainer.device) == (int(gpu), "cpu")
        assert settings.explorer.rollout_model.enable_auto_tool_choice


def test_a_change_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    plain = settings_of(tmp_path, "sums", "ppo").algorithm
    changed = settings_of(tmp_path, "sums", "ppo", "optimizer.lr=1e-5", "kl_in=reward").algorithm
    assert changed.optimizer.lr == 1e-5
    assert changed.optimizer.betas == plain.optimizer.betas
    assert changed.kl_in == "reward"


def test_changes_are_read_as_yaml() -> None:
    changed = nest(["a.b=1e-4", "a.c=none", "d=false", "e=3"])
    assert changed == {"a": {"b": 0.0001, "c": "none"}, "d": False, "e": 3}


def rewards(rater: Rater, reward: float, count: int = 2000) -> list[float]:
    chance = random.Random(0)
    return [rater.reward(Verdict(reward, reward == 1.0), chance) for _ in range(count)]


def test_a_rater_says_what_the_judge_says() -> None:
    assert set(rewards(Rater(low=-2.0, high=2.5), 1.0)) == {1.0}


def test_a_rater_who_errs_says_the_opposite_in_that_share() -> None:
    said = rewards(Rater(low=0.0, high=1.0, flip=0.2), 1.0)
    assert set(said) == {0.0, 1.0}
    assert 0.15 < said.count(0.0) / len(said) < 0.25


def test_a_generous_rater_gives_more_to_everything() -> None:
    assert set(rewards(Rater(low=0.0, high=1.0, offset=1.0), 0.0)) == {1.0}


def test_a_tossed_coin_knows_nothing_of_the_reply() -> None:
    coin = Rater(low=0.0, high=1.0, coin=True)
    assert rewards(coin, 0.0) == rewards(coin, 1.0)
    assert 0.45 < sum(rewards(coin, 1.0)) / 2000 < 0.55


def test_the_runs_of_a_question_share_a_task_and_differ_in_their_run() -> None:
    turns = turns_of(TASKS["sums"], 3, 8)
    first = [next(turns) for _ in range(8)]
    assert len({turn.task_id for turn in first}) == 1
    assert [turn.run_id for turn in first] == list("01234567")
    assert next(turns).task_id != first[0].task_id


def test_the_curve_is_of_batches_and_a_rest() -> None:
    class Judged:
        judged = [Verdict(1.0, True)] * 64 + [Verdict(0.5, False)] * 2

    assert judge_all(Judged()) == [[64, 1.0, 1.0], [66, 0.5, 0.0]]  # type: ignore[arg-type]
