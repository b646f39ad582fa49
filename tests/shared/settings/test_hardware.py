from typing import Any

from tuneloop.shared.settings.hardware import fit_to_machine
from tuneloop.shared.settings.settings import Settings


def settings(**but: Any) -> Settings:
    rollout = {"engine_num": 2, "tensor_parallel_size": 2, **but.pop("rollout", {})}
    values = {"model": {"model_path": "m"}, "cluster": {"gpu_per_node": 5}, "explorer": {"rollout_model": rollout}}
    return Settings.model_validate(values | but)


def test_where_there_are_gpus_the_settings_stay_as_they_are() -> None:
    assert fit_to_machine(settings(), gpus_here=5) == settings()


def test_without_a_gpu_everything_runs_on_the_cpu_and_engines_are_one_process_each() -> None:
    here = fit_to_machine(settings(), gpus_here=0)
    assert here.cluster.gpu_per_node == 0
    assert here.explorer.rollout_model.tensor_parallel_size == 1
    assert here.explorer.rollout_model.engine_num == 2
    assert here.trainer_dtype == "float32"


def test_engines_of_others_need_no_gpu_here() -> None:
    attached = settings(rollout={"engine_urls": ["http://gpu-box:8000"]})
    assert fit_to_machine(attached, gpus_here=0) == attached


def test_engines_on_several_machines_need_no_gpu_here() -> None:
    spread = settings(cluster={"gpu_per_node": 5, "node_num": 2}, mode="serve")
    assert fit_to_machine(spread, gpus_here=0) == spread


def test_weights_in_training_are_bfloat16_on_gpus_only() -> None:
    assert settings().trainer_dtype == "bfloat16"
    assert settings(trainer={"device": "cpu"}).trainer_dtype == "float32"
    assert settings(trainer={"dtype": "float32"}).trainer_dtype == "float32"
