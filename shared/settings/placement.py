"""Which GPU of this machine does what, as explorer and trainer choose them."""

import structlog

from tuneloop.shared.settings.settings import Settings

_log = structlog.get_logger()


def trainer_on_gpu(settings: Settings) -> bool:
    """Whether the trainer's models are on a GPU."""
    return settings.trainer.device == "cuda" or (
        settings.trainer.device == "auto" and settings.cluster.gpu_per_node > 0
    )


def users_of_gpus(settings: Settings) -> dict[int, list[str]]:
    """Who runs on each GPU, by its number from 0; nobody on one that idles."""
    count, size = settings.cluster.gpu_per_node, settings.explorer.rollout_model.tensor_parallel_size
    users: dict[int, list[str]] = {number: [] for number in range(count)}
    taken = settings.gpus_of_engines if settings.mode != "train" else 0
    for number in range(min(count, taken)):
        users[number].append(f"engine {number // size}")
    if settings.mode != "train" and settings.has_spare_gpus and settings.spare_places:
        first = (count // size - 1) * size
        for number in range(first, first + size):
            users[number].append("spare engine")
    if settings.mode != "serve" and count and trainer_on_gpu(settings):
        workers = min(settings.trainer_workers, count)
        for rank in range(workers):
            number = min((taken if settings.mode == "both" else 0) + rank, count - 1)
            users[number].append("trainer" if workers == 1 else f"trainer {rank}")
    return users


def is_trainer(user: str) -> bool:
    """Whether a user of a GPU is the trainer, or one of its workers."""
    return user.startswith("trainer")


def placement_sentence(settings: Settings) -> str | None:
    """What each GPU does, in words; None without GPUs."""
    users = users_of_gpus(settings)
    if not users:
        return None
    return ", ".join(f"GPU {number}: {' and '.join(names) or 'idle'}" for number, names in users.items())


def idle_sentence(settings: Settings) -> str | None:
    """Which GPUs idle, and what would use them; None if none does."""
    idle = [str(number) for number, names in users_of_gpus(settings).items() if not names]
    if not idle:
        return None
    cure = {
        "serve": "explorer.rollout_model.engine_num",
        "train": "trainer.workers",
        "both": "trainer.workers or explorer.rollout_model.engine_num",
    }[settings.mode]
    which = f"GPU {idle[0]} idles" if len(idle) == 1 else f"GPUs {', '.join(idle)} idle"
    return f"{which}: raise {cure}, or lower cluster.gpu_per_node"


def log_placement(settings: Settings) -> None:
    """Say which GPU does what, and which idle."""
    if sentence := placement_sentence(settings):
        _log.info("gpus", sentence=sentence)
    if idle := idle_sentence(settings):
        _log.warning("gpus_idle", sentence=idle)
