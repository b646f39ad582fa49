"""The names of a checkpoint's folders and files, and which of them an older version keeps."""

import re
from pathlib import Path

ACTOR, CRITIC, TRAINER_STATE = "actor", "critic", "trainer_state"

#: What the actor's folder holds where only an adapter is trained; peft's own names.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: The small files of the trainer's state: its counters, and the state of its random generator.
COUNTERS, RANDOM = "state.json", "random.safetensors"

MANIFEST = "manifest.json"
_WEIGHTS_ONLY = ".weights-only"
VERSION_PREFIX = "global_step_"
_VERSION_FOLDER = re.compile(rf"{VERSION_PREFIX}(\d+)(?:-\d+)?")
STAGING = ".staging-"
GARBAGE = ".garbage-"


def version_in(name: str) -> int | None:
    """The version whose folder has this name, if it is one's."""
    found = _VERSION_FOLDER.fullmatch(name)
    return int(found[1]) if found else None


def is_weights_only(path: Path) -> bool:
    """Whether critic and optimiser of the version in `path` are deleted, or about to be."""
    return (path / _WEIGHTS_ONLY).exists()


def mark_weights_only(path: Path) -> Path:
    """Say that critic and optimiser of the version in `path` are about to be deleted; returns the mark."""
    mark = path / _WEIGHTS_ONLY
    mark.touch()
    return mark


def for_going_on(path: Path) -> list[Path]:
    """What of a version only going on from it to the bit needs."""
    state = [each for each in (path / TRAINER_STATE).glob("*") if each.name not in {COUNTERS, RANDOM}]
    return [path / CRITIC, *state] if (path / CRITIC).exists() else state


def size_without_weights(path: Path) -> int:
    """Bytes that `CheckpointStore.strip` would make free."""
    files = (leaf for each in for_going_on(path) for leaf in ([each] if each.is_file() else each.rglob("*")))
    return sum(file.stat().st_size for file in files)


def stays(name: str) -> bool:
    """Whether an older version keeps this file."""
    folder, _, rest = name.partition("/")
    return folder == ACTOR or (folder == TRAINER_STATE and rest in {COUNTERS, RANDOM})


def leaves(top: Path) -> list[Path]:
    """Everything below `top` that is not a folder, links to folders included."""
    return sorted(path for path in top.rglob("*") if path.is_symlink() or not path.is_dir())
