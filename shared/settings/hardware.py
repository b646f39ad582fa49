"""What this machine has, what of the settings that changes, and which GPU does what."""

import os
import re
from contextlib import suppress
from pathlib import Path

import structlog

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: Where a container sees what its memory is bound to.
_GROUP = Path("/sys/fs/cgroup")

_MOST_API_SERVERS = 4

#: Workers for each engine on GPUs: the chunks of some hundred streams of one take most of a core.
_MOST_WORKERS = 2


def count_gpus() -> int:
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def free_memory() -> int:
    """Bytes of main memory that new processes may take, within this control group's bound."""
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = [int(found[1]) << 10 if found else 0]
    with suppress(OSError, ValueError):  # "max" is no bound
        bound, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free.append(max(0, bound - used))
    return min(free)


def gpus_from(first: int, size: int) -> list[str]:
    """`size` GPUs from number `first` on, of this machine or CUDA_VISIBLE_DEVICES; EnvironmentRefused if too few."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(first + each) for each in range(size)]
    named = [each.strip() for each in given.split(",") if each.strip()]
    if len(named) < first + size:
        raise EnvironmentRefused(
            f"cluster.gpu_per_node: the engines need {first + size} GPUs or more, CUDA_VISIBLE_DEVICES names "
            f"{len(named)} ({given!r}); name more there, or lower explorer.rollout_model.engine_num"
        )
    return named[first : first + size]


def api_servers_of(settings: Settings) -> int:
    """API servers an engine: 1 without GPUs, else half of the cores, up to 4 an engine (more measured no faster)."""
    rollout, cluster = settings.explorer.rollout_model, settings.cluster
    if rollout.api_servers is not None:
        return rollout.api_servers
    if not cluster.gpu_per_node or rollout.single_process or settings.model.lora.rank:
        return 1
    engines = -(-rollout.engine_num // cluster.node_num)
    return max(1, min(_MOST_API_SERVERS, len(os.sched_getaffinity(0)) // (2 * engines)))


def explorer_workers_of(settings: Settings) -> int:
    """Worker processes: by default 1 without GPUs, else up to two an engine from a quarter of the cores."""
    explorer, rollout = settings.explorer, settings.explorer.rollout_model
    if explorer.workers is not None:
        return explorer.workers
    if not settings.cluster.gpu_per_node:
        return 1
    engines = len(rollout.engine_urls) or rollout.engine_num
    return max(1, min(_MOST_WORKERS * engines, len(os.sched_getaffinity(0)) // 4))


def missing_gpus(settings: Settings, *, gpus_here: int) -> str | None:
    """Which GPUs of the settings this machine lacks; None where none are missing, or others' are used."""
    cluster = settings.cluster
    if settings.explorer.rollout_model.engine_urls or cluster.node_num > 1 or gpus_here >= cluster.gpu_per_node:
        return None
    there = (
        f"there are {gpus_here} GPUs here" if gpus_here else "there is no GPU here: all runs on the CPU, slowly, and"
    )
    counts = "" if gpus_here else " tensor_parallel_size counts as 1"
    return f"cluster.gpu_per_node is {cluster.gpu_per_node}, but {there}{counts}"


def fit_to_machine(settings: Settings, *, gpus_here: int) -> Settings:
    """The settings as they can be run here: without a GPU everything runs on the CPU, each engine as one process."""
    rollout = settings.explorer.rollout_model
    if (sentence := missing_gpus(settings, gpus_here=gpus_here)) is None or (gpus_here and settings.mode != "train"):
        return settings
    log.warning("fewer_gpus" if gpus_here else "no_gpu", sentence=sentence)
    if gpus_here:
        cluster = settings.cluster.model_copy(update={"gpu_per_node": gpus_here})
        return settings.model_copy(update={"cluster": cluster})
    explorer = settings.explorer.model_copy(
        update={"rollout_model": rollout.model_copy(update={"tensor_parallel_size": 1})}
    )
    cluster = settings.cluster.model_copy(update={"gpu_per_node": 0})
    return settings.model_copy(update={"explorer": explorer, "cluster": cluster})


def trainer_on_gpu(settings: Settings) -> bool:
    return settings.trainer.device == "cuda" or (
        settings.trainer.device == "auto" and settings.cluster.gpu_per_node > 0
    )


def users_of_gpus(settings: Settings) -> dict[int, list[str]]:
    """Who runs on each GPU, by its number from 0; empty for one that idles."""
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
    if sentence := placement_sentence(settings):
        log.info("gpus", sentence=sentence)
    if idle := idle_sentence(settings):
        log.warning("gpus_idle", sentence=idle)
