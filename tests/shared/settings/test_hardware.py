from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tuneloop.shared.settings import hardware
from tuneloop.shared.settings.hardware import explorer_workers_of, fit_to_machine, free_memory, missing_gpus
from tuneloop.shared.settings.settings import Settings


def settings(**but: Any) -> Settings:
    rollout = {"engine_num": 2, "tensor_parallel_size": 2, **but.pop("rollout", {})}
    values = {"model": {"model_path": "m"}, "cluster": {"gpu_per_node": 5}, "explorer": {"rollout_model": rollout}}
    return Settings.model_validate(values | but)


def test_without_a_gpu_everything_runs_on_the_cpu_and_engines_are_one_process_each() -> None:
    here = fit_to_machine(settings(), gpus_here=0)
    assert here.cluster.gpu_per_node == 0
    assert here.explorer.rollout_model.tensor_parallel_size == 1
    assert here.explorer.rollout_model.engine_num == 2
    assert here.trainer_dtype == "float32"


def test_engines_of_others_need_no_gpu_here() -> None:
    attached = settings(rollout={"engine_urls": ["http://gpu-box:8000"]})
    assert fit_to_machine(attached, gpus_here=0) == attached


def test_a_trainer_alone_takes_the_gpus_that_there_are() -> None:
    with capture_logs() as logs:
        here = fit_to_machine(settings(mode="train"), gpus_here=2)
    assert (here.cluster.gpu_per_node, here.trainer_workers) == (2, 2)
    assert [each["event"] for each in logs] == ["fewer_gpus"]
    assert fit_to_machine(settings(mode="serve"), gpus_here=2) == settings(mode="serve")


def test_gpus_that_are_missing_are_told() -> None:
    assert missing_gpus(settings(), gpus_here=2) == "cluster.gpu_per_node is 5, but there are 2 GPUs here"
    assert "is 5, but there is no GPU here: all runs on the CPU" in str(missing_gpus(settings(), gpus_here=0))
    several = settings(mode="serve", cluster={"gpu_per_node": 5, "node_num": 2})
    for elsewhere in (settings(rollout={"engine_urls": ["http://gpu-box:8000"]}), several):
        assert missing_gpus(elsewhere, gpus_here=0) is None
    assert missing_gpus(settings(), gpus_here=5) is None


def test_weights_in_training_are_bfloat16_on_gpus_only() -> None:
    assert settings().trainer_dtype == "bfloat16"
    assert settings(trainer={"device": "cpu"}).trainer_dtype == "float32"
    assert settings(trainer={"dtype": "float32"}).trainer_dtype == "float32"


ENGINES = "explorer.rollout_model"


@pytest.mark.parametrize(
    ("more", "places"),
    [
        ({}, 1),
        ({f"{ENGINES}.spare_place": False}, 0),
        ({"mode": "serve", "cluster.gpu_per_node": 2}, 1),
        ({"mode": "serve", "cluster.gpu_per_node": 1}, 0),
        ({"mode": "both", "cluster.gpu_per_node": 2}, 0),
        ({"mode": "both", "cluster.gpu_per_node": 3}, 0),
        ({"mode": "both", "cluster.gpu_per_node": 3, f"{ENGINES}.spare_place": True}, 1),
        ({"mode": "both", "cluster.gpu_per_node": 3, "trainer.workers": 1}, 1),
        ({"mode": "serve", "cluster.gpu_per_node": 2, "cluster.node_num": 2}, 0),
        ({"mode": "serve", "cluster.gpu_per_node": 1, f"{ENGINES}.spare_place": True}, 1),
        ({f"{ENGINES}.engine_urls": ["http://a:1"]}, 0),
        ({"model.lora.rank": 8, "cluster.gpu_per_node": 0}, 0),
    ],
)
def test_there_is_a_spare_place_where_there_is_room_for_one_more_engine(more: dict[str, Any], places: int) -> None:
    assert settings_with(more).spare_places == places


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"explorer.on_reload": "restart", f"{ENGINES}.engine_urls": ["http://a:1"]}, "engine_urls are others'"),
        (
            {"mode": "serve", "cluster.gpu_per_node": 2, f"{ENGINES}.engine_num": 2, f"{ENGINES}.spare_place": True},
            "no GPUs are left",
        ),
    ],
)
def test_what_cannot_be_started_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settings_with(more)


def settings_with(more: dict[str, Any]) -> Settings:
    values: dict[str, Any] = {"model": {"model_path": "/model"}}
    for name, value in more.items():
        *sections, option = name.split(".")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
        section[option] = value
    return Settings.model_validate(values)


def test_free_memory_is_what_is_left_of_the_control_groups_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_GROUP", tmp_path)
    assert free_memory() > 1 << 20
    (tmp_path / "memory.max").write_text("9000\n")
    (tmp_path / "memory.current").write_text("8000\n")
    assert free_memory() == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() > 1 << 20


@pytest.mark.parametrize(
    ("cores", "explorer", "gpus", "workers"),
    [
        (64, {}, 0, 1),
        (1, {}, 1, 1),
        (7, {}, 1, 1),
        (10, {}, 1, 2),
        (64, {}, 1, 2),
        (64, {"rollout_model": {"engine_num": 4}}, 4, 8),
        (64, {"rollout_model": {"engine_urls": ["http://a", "http://b", "http://c"]}}, 1, 6),
        (64, {"workers": 3}, 1, 3),
        (2, {"workers": 3}, 0, 3),
    ],
)
def test_workers_are_by_the_cores_and_engines_where_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, cores: int, explorer: dict[str, object], gpus: int, workers: int
) -> None:
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(range(cores)))
    values = {"mode": "serve", "model": {"model_path": "m"}, "cluster": {"gpu_per_node": gpus}, "explorer": explorer}
    assert explorer_workers_of(Settings.model_validate(values)) == workers
