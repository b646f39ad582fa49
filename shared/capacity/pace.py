"""Compares the trainer's pace with the rate of commits, from its notes of each version, and names a cure."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from tuneloop.shared.held_files import make_below

WINDOW_S = 600.0

_BEHIND = 1.2


class VersionPace(msgspec.Struct, frozen=True, kw_only=True):
    """A version, registered `at` the ledger's time; `step_s` and `publish_s` of the time since the one before."""

    at: float
    consumed: int
    waiting: int
    set_aside: int
    step_s: float
    publish_s: float


class TrainerPace(NamedTuple):
    committed: float
    trained: float
    steps: float
    publishing: float

    @property
    def lag(self) -> float:
        """How many are committed for each that is trained on; 1 keeps up."""
        return self.committed / self.trained

    @property
    def sentence(self) -> str:
        rates = f"{self.committed:.3g} replies a second are committed, {self.trained:.3g} trained"
        if self.lag < _BEHIND:
            return f"{rates}: the trainer keeps up"
        other = max(0.0, 1 - self.steps - self.publishing)
        if self.publishing >= max(self.steps, other):
            cure = f"publishing takes {self.publishing:.0%} of its time: raise trainer.save_interval"
        elif self.steps >= other:
            cure = f"steps take {self.steps:.0%} of its time: more or faster GPUs, an adapter (model.lora.rank), or a"
            cure += " method without a critic"
        else:
            cure = f"{other:.0%} of its time is neither steps nor publishing: evaluate less often, or see what it"
            cure += " waits for"
        return f"{rates}: the trainer lags {self.lag:.2g} times behind; {cure}"


def note_version(job_dir: Path, version: VersionPace) -> None:
    file = _file(job_dir)
    make_below(file.parent)
    draft = file.with_suffix(".tmp")
    earlier = _read(file)
    # Those of the last minutes and one before them, two at least.
    before = [at for at, each in enumerate(earlier) if version.at - each.at >= WINDOW_S]
    draft.write_bytes(msgspec.json.encode([*earlier[before[-1] if before else 0 :], version]))
    draft.replace(file)


def find_pace(job_dir: Path, now: float) -> TrainerPace | None:
    """The pace of the last minutes; None before two versions, or if there was none for much longer than usual."""
    versions = _read(_file(job_dir))
    if len(versions) < 2 or now - versions[-1].at > max(WINDOW_S, 2 * (versions[-1].at - versions[-2].at)):
        return None
    first, *since = versions
    seconds, trained = since[-1].at - first.at, sum(each.consumed for each in since)
    if seconds <= 0 or not trained:
        return None
    committed = trained + sum(each.set_aside for each in since) + since[-1].waiting - first.waiting
    return TrainerPace(
        committed=max(0, committed) / seconds,
        trained=trained / seconds,
        steps=sum(each.step_s for each in since) / seconds,
        publishing=sum(each.publish_s for each in since) / seconds,
    )


def _file(job_dir: Path) -> Path:
    return job_dir / "monitor" / "pace.json"


def _read(file: Path) -> list[VersionPace]:
    """What was written; nothing if there is none, or none that can be read: the figures begin again then."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[VersionPace])
    except (OSError, msgspec.MsgspecError):
        return []
