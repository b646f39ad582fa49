"""What tune() was told, as the settings of a service: what `tuneloop run --config` reads."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import TuneRefused
from tuneloop.runner.tuning.config import OF_GROUPS, AlgorithmConfig, TinkerConfig, TunerModelConfig, require_monitor

Settings = dict[str, Any]

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]

#: What an engine takes of the one GPU that the trainer is on too.
_SHARED_GPU = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlace:
    """Where a service keeps what it has, `checkpoint_root_dir`/`project`/`name`, and the port that it listens on."""

    project: str = "AgentScope"
    name: str = "Experiment"
    checkpoint_root_dir: str | Path = "checkpoints"
    port: int = 8010


def service_settings(
    model: TunerModelConfig,
    algorithm: AlgorithmConfig,
    place: ServicePlace,
    *,
    monitor_type: str | None = None,
    gpus: int | None = None,
    over: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings of both services for one model. `over` are settings of ours that win; `gpus` None: as many as are here.

    A version is published after each step, as on-policy training wants it. Raises TuneRefused.
    """
    require_monitor(monitor_type)
    if model.temperature == 0:
        raise TuneRefused(
            "TunerModelConfig: temperature 0 gives the same reply every time, so that there is nothing to compare: "
            "train at 1.0"
        )
    gpus = count_gpus() if gpus is None else gpus
    made: Settings = {
        "mode": "both",
        "project": place.project,
        "name": place.name,
        "checkpoint_root_dir": str(place.checkpoint_root_dir),
        "model": _model(model),
        "cluster": {"gpu_per_node": gpus},
        "algorithm": {
            "algorithm_type": algorithm.algorithm_type,
            "optimizer": {"lr": algorithm.learning_rate},
        },
        "explorer": {
            "listen_address": "127.0.0.1",
            "proxy_port": place.port,
            "rollout_model": _rollout_model(model, gpus),
        },
        "trainer": {"save_interval": 1},
        "buffer": _buffer(algorithm),
        # The judge is the caller's own function: what it returns is what was meant.
        "reward": {"clip": None},
    }
    if monitor_type is not None:
        made["monitor"] = {"monitor_type": monitor_type}
    return merge_settings(made, over or {})


def merge_settings(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    """The settings with the changes, section by section."""
    both = {
        name: merge_settings(settings[name], each)
        for name, each in changes.items()
        if isinstance(settings.get(name), Mapping) and isinstance(each, Mapping)
    }
    return {**settings, **changes, **both}


def count_gpus() -> int:
    """How many GPUs this process may use; 0 if there is no NVIDIA driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() and each.strip() != "-1"])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def _model(model: TunerModelConfig) -> Settings:
    short = model.max_model_len is None or model.max_tokens < model.max_model_len
    found: Settings = {
        "model_path": model.model_path,
        "max_model_len": model.max_model_len,
        "max_response_tokens": model.max_tokens if short else None,
        "temperature": model.temperature,
    }
    if model.tinker_config is not None:
        found["lora"] = _lora(model.tinker_config)
    return found


def _lora(tinker: TinkerConfig) -> Settings:
    targets = (_ATTENTION if tinker.train_attn else []) + (_MLP if tinker.train_mlp else [])
    return {"rank": tinker.rank, "targets": targets}


def _rollout_model(model: TunerModelConfig, gpus: int) -> Settings:
    found: Settings = {
        "engine_num": model.inference_engine_num,
        "tensor_parallel_size": model.tensor_parallel_size,
        "enable_auto_tool_choice": model.tool_call_parser is not None,
        "tool_call_parser": model.tool_call_parser,
        "reasoning_parser": model.reasoning_parser,
    }
    wanted = model.inference_engine_num * model.tensor_parallel_size
    if gpus and wanted > gpus:
        raise TuneRefused(
            f"TunerModelConfig: inference_engine_num {model.inference_engine_num} x tensor_parallel_size "
            f"{model.tensor_parallel_size} is more than the {gpus} GPUs that there are"
        )
    if gpus and wanted == gpus:
        found["gpu_memory_utilization"] = _SHARED_GPU
    if not gpus:
        found["dtype"] = "float32"
    return found


def _buffer(algorithm: AlgorithmConfig) -> Settings:
    """The runs of a task are trained on together where the method compares them, the calls of a run anywhere else."""
    compared = algorithm.algorithm_type in OF_GROUPS
    found: Settings = {
        "group_by": "task" if compared else "run",
        "train_batch_size": algorithm.batch_size * algorithm.group_size,
    }
    return found | ({"group_size": algorithm.group_size} if compared else {})
