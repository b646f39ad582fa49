"""What is ordered of a Ray cluster."""

from pathlib import Path

import msgspec

from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.engines.process import EngineProcess
from tuneloop.explorer.engines.ray_engine import SPEC_VARIABLE, RayEngineSpec
from tuneloop.shared.settings.settings import Settings


def test_an_engine_elsewhere_gets_the_gpus_that_ray_chooses(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {
            "mode": "serve",
            "checkpoint_root_dir": tmp_path,
            "model": {"model_path": "m"},
            "cluster": {"node_num": 2, "gpu_per_node": 2, "ray_address": "head:6379"},
            "explorer": {"rollout_model": {"engine_num": 2, "tensor_parallel_size": 2}},
        }
    )
    socket = tmp_path / "1.sock"
    command, environment = EngineProcess(settings, Engine(1, EngineHttp()), socket=socket).command(Path("weights"))
    order = msgspec.json.decode(environment[SPEC_VARIABLE], type=RayEngineSpec)
    assert command[-1] == "tuneloop.explorer.engines.ray_engine"
    assert (order.ray_address, order.gpus) == ("head:6379", 2)
    assert "CUDA_VISIBLE_DEVICES" not in order.environment
    assert order.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert order.command.count(str(socket)) == order.command.count("weights") == 1
