"""What this machine has, and what of the settings that changes."""

from pathlib import Path

import structlog

from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()


def count_gpus() -> int:
    """NVIDIA GPUs that this machine has."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def fit_to_machine(settings: Settings, *, gpus_here: int) -> Settings:
    """The settings as they can be run here: without a GPU everything runs on the CPU, each engine as one process."""
    rollout = settings.explorer.rollout_model
    elsewhere = rollout.engine_urls or settings.cluster.node_num > 1
    if gpus_here or elsewhere or not settings.cluster.gpu_per_node:
        return settings
    log.warning(
        "no_gpu",
        sentence=f"cluster.gpu_per_node is {settings.cluster.gpu_per_node}, but there is no GPU here: all runs on the "
        "CPU, slowly, and tensor_parallel_size counts as 1",
    )
    explorer = settings.explorer.model_copy(
        update={"rollout_model": rollout.model_copy(update={"tensor_parallel_size": 1})}
    )
    cluster = settings.cluster.model_copy(update={"gpu_per_node": 0})
    return settings.model_copy(update={"explorer": explorer, "cluster": cluster})
