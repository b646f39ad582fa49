"""Which GPU does what: none idles without a word."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tuneloop.shared.settings.hardware import idle_sentence, log_placement, placement_sentence, users_of_gpus
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings

TRINITY = Path(__file__).parents[2] / "fixtures" / "trinity"


def settings(mode: str, gpus: int, *, engines: int = 1, nodes: int = 1, **trainer: Any) -> Settings:
    rollout = {"engine_num": engines, "gpu_memory_utilization": 0.4, "spare_place": trainer.pop("spare_place", None)}
    return Settings.model_validate(
        {
            "mode": mode,
            "model": {"model_path": "m"},
            "cluster": {"gpu_per_node": gpus, "node_num": nodes},
            "explorer": {"rollout_model": rollout, "on_reload": trainer.pop("on_reload", "keep")},
            "trainer": trainer,
        }
    )


def test_trinitys_trainer_file_with_four_gpus_uses_four() -> None:
    four = load_settings(TRINITY / "trainer.yaml")
    assert four.trainer_workers == 4
    assert users_of_gpus(four) == {0: ["trainer 0"], 1: ["trainer 1"], 2: ["trainer 2"], 3: ["trainer 3"]}
    assert idle_sentence(four) is None


@pytest.mark.parametrize(
    ("chosen", "workers"),
    [
        (settings("train", 0), 1),
        (settings("train", 1), 1),
        (settings("train", 4, workers=3), 3),
        (settings("train", 0, workers=3), 3),
        (settings("train", 4, device="cpu"), 1),
        (settings("train", 4, nodes=2), 8),
        (settings("both", 1), 1),
        (settings("both", 4, engines=2), 2),
        (settings("both", 4, engines=2, spare_place=True), 1),
        (settings("both", 4, engines=2, on_reload="restart"), 1),
        (settings("both", 4, engines=2, on_reload="restart", spare_place=False), 2),
    ],
)
def test_a_trainer_has_a_worker_for_each_gpu_that_no_engine_takes(chosen: Settings, workers: int) -> None:
    assert chosen.trainer_workers == workers


def test_more_workers_than_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer.workers: 3 need a GPU each, and 2 are free of engines \(mode: both"):
        settings("both", 4, engines=2, workers=3)


@pytest.mark.parametrize(
    ("chosen", "says", "idle"),
    [
        (settings("both", 1), "GPU 0: engine 0 and trainer", None),
        (settings("both", 3), "GPU 0: engine 0, GPU 1: trainer 0, GPU 2: trainer 1", None),
        (settings("serve", 2), "GPU 0: engine 0, GPU 1: spare engine", None),
        (
            settings("both", 3, workers=1, spare_place=False),
            "GPU 0: engine 0, GPU 1: trainer, GPU 2: idle",
            "GPU 2 idles: raise trainer.workers or explorer.rollout_model.engine_num, or lower cluster.gpu_per_node",
        ),
        (
            settings("train", 3, workers=1),
            "GPU 0: trainer, GPU 1: idle, GPU 2: idle",
            "GPUs 1, 2 idle: raise trainer.workers, or lower cluster.gpu_per_node",
        ),
        (settings("both", 0), None, None),
    ],
)
def test_it_is_said_what_each_gpu_does_and_which_idle(chosen: Settings, says: str | None, idle: str | None) -> None:
    assert (placement_sentence(chosen), idle_sentence(chosen)) == (says, idle)
    with capture_logs() as logs:
        log_placement(chosen)
    told = [(each["event"], each["log_level"], each["sentence"]) for each in logs]
    expected = [("gpus", "info", says), ("gpus_idle", "warning", idle)]
    assert told == [each for each in expected if each[2]]
