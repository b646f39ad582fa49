"""What a job is trained with, and what is refused in a sentence."""

from pathlib import Path
from typing import Any

import pytest

from tuneloop.shared.errors import JobRefused
from tuneloop.shared.finetuning.job_plan import plan_job
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings


def settings(tmp_path: Path, **but: Any) -> Settings:
    tree = {
        "mode": "both",
        "model": {"model_path": tmp_path, "lora": {"rank": 4}},
        "algorithm": {"algorithm_type": "grpo", "optimizer": {"lr": 1e-6}, "mini_batches": 2},
        "buffer": {"group_by": "task", "train_batch_size": 64},
        "trainer": {"total_steps": 7, "max_staleness": 2},
        "rollout": {"mode": "canary"},
    }
    return Settings.model_validate(tree | but)


@pytest.mark.parametrize(
    ("lines", "epochs", "batch"), [(1, 3, 1), (200, 3, 8), (1_000, 3, 32), (5_000, 2, 32), (10_001, 1, 32)]
)
def test_auto_depends_on_the_lines(tmp_path: Path, lines: int, epochs: int, batch: int) -> None:
    plan = plan_job(settings(tmp_path), "supervised", {"n_epochs": "auto"}, lines=lines, seed=1)
    assert plan.hyperparameters == {"n_epochs": epochs, "batch_size": batch, "learning_rate_multiplier": 100.0}
    assert plan.rows_in_all == epochs * lines
    assert plan.total_steps == epochs * -(-lines // batch)


def test_a_supervised_job_imitates_whatever_the_service_does(tmp_path: Path) -> None:
    asked = {"n_epochs": 2, "batch_size": 3, "learning_rate_multiplier": 50}
    plan = plan_job(settings(tmp_path), "supervised", asked, lines=10, seed=-1)
    chosen = settings_of_policy(settings(tmp_path), plan.options)
    assert (chosen.algorithm.algorithm_type, chosen.algorithm.sft.targets) == ("sft", "replies")
    assert chosen.algorithm.optimizer.lr == pytest.approx(5e-5)
    assert (chosen.algorithm.mini_batches, chosen.buffer.group_by, chosen.buffer.train_batch_size) == (1, "none", 3)
    assert (chosen.trainer.save_interval, chosen.trainer.total_steps, chosen.trainer.max_staleness) == (4, None, None)
    assert (chosen.rollout.mode, chosen.gate.mode, chosen.buffer.max_backlog) == ("all", "off", None)


def test_a_batch_of_preferences_is_of_pairs(tmp_path: Path) -> None:
    plan = plan_job(settings(tmp_path), "dpo", {"beta": 0.3, "batch_size": 4, "n_epochs": 1}, lines=9, seed=1)
    chosen = settings_of_policy(settings(tmp_path), plan.options)
    assert (chosen.algorithm.algorithm_type, chosen.algorithm.dpo.beta) == ("dpo", 0.3)
    assert (chosen.buffer.train_batch_size, chosen.trainer.save_interval, plan.total_steps) == (8, 3, 3)
    assert plan.hyperparameters["learning_rate_multiplier"] == 10


@pytest.mark.parametrize(("own", "used"), [("grpo", "grpo"), ("sft", "grpo"), ("ppo", "ppo")])
def test_reinforcement_is_the_services_own_method(tmp_path: Path, own: str, used: str) -> None:
    chosen = settings(tmp_path, algorithm={"algorithm_type": own})
    asked = {"compute_multiplier": 2, "batch_size": 3, "n_epochs": 2, "reasoning_effort": "low"}
    plan = plan_job(chosen, "reinforcement", asked, lines=10, seed=1)
    made = settings_of_policy(chosen, plan.options)
    assert (made.algorithm.algorithm_type, made.buffer.group_by, made.buffer.group_size) == (used, "task", 8)
    assert (made.buffer.train_batch_size, made.trainer.save_interval, plan.total_steps) == (24, 1, 8)
    assert plan.hyperparameters == {
        "n_epochs": 2,
        "batch_size": 3,
        "learning_rate_multiplier": 1.0,
        "compute_multiplier": 2.0,
        "eval_interval": 4,
        "eval_samples": 1,
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize(
    ("method", "asked", "said"),
    [
        ("supervised", {"beta": 0.1}, "beta: supervised has no such hyperparameter; it has n_epochs, batch_size"),
        ("supervised", {"n_epochs": 0}, "n_epochs: must be a whole number from 1 to 50, or auto"),
        ("supervised", {"n_epochs": 1.5}, "n_epochs: must be a whole number"),
        ("supervised", {"batch_size": True}, "batch_size: must be a whole number from 1 to 256"),
        ("supervised", {"learning_rate_multiplier": 0}, "learning_rate_multiplier: must be a number above 0"),
        ("supervised", {"learning_rate_multiplier": float("nan")}, "learning_rate_multiplier: must be"),
        ("dpo", {"beta": "much"}, "beta: must be a number above 0, up to 2, or auto"),
        ("reinforcement", {"reasoning_effort": "huge"}, "reasoning_effort: huge is none of default, low"),
        ("unheard", {}, "method: unheard is none of supervised, dpo, reinforcement"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path, method: str, asked: Any, said: str) -> None:
    with pytest.raises(JobRefused, match=said):
        plan_job(settings(tmp_path), method, asked, lines=10, seed=1)


def test_where_all_weights_are_trained_or_nothing_is_in_the_file_there_is_no_job(tmp_path: Path) -> None:
    with pytest.raises(JobRefused, match="a job needs an adapter"):
        plan_job(settings(tmp_path, model={"model_path": tmp_path}, rollout={}), "supervised", {}, lines=10, seed=1)
    with pytest.raises(JobRefused, match="training_file: it has no lines"):
        plan_job(settings(tmp_path), "supervised", {}, lines=0, seed=1)
