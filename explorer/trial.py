"""Which version each engine should have while one is being tried, and how the requests are divided then.

The ledger says what is tried, and since when and how; all here is decided from that alone, so that an explorer which is
started again goes on where the one before it was.
"""

from collections.abc import Sequence
from typing import NamedTuple

from explorer.fleet import Engine, EngineState
from explorer.split import Split, split_of
from shared.config_rollout import Rollout
from shared.experience import VersionAction
from shared.ledger import Ledger, Version


class Trial(NamedTuple):
    """A version that is being tried since `began`, and what it gets."""

    version: Version
    mode: str
    share: float
    began: float

    @property
    def split(self) -> Split:
        """How the requests are divided."""
        return split_of(self.mode, self.version.version, self.share)


def trial_of(ledger: Ledger, rollout: Rollout) -> Trial | None:
    """The trial that is under way, on the terms that it was begun with, if there is one."""
    canary = ledger.canary()
    if canary is None:
        return None
    begun = [each for each in ledger.version_events(canary.version) if each.action is VersionAction.CANARY][-1]
    mode, share = begun.details.get("mode", rollout.mode), begun.details.get("share", rollout.tried_share)
    return Trial(canary, mode if mode in {"canary", "shadow", "ab"} else "canary", share, begun.at)


def to_try_on(engines: Sequence[Engine], version: int, share: float) -> list[Engine]:
    """The engines that get a version which is being tried: about its share of those that are up, but at least one.

    At least one is left to the champion, which comes first where there is but one. Who has the version keeps it.
    """
    up = _up(engines)
    count = min(max(1, round(share * len(up))), len(up) - 1)
    by_preference = sorted(up, key=lambda engine: (engine.version != version, -engine.number))
    return by_preference[: max(count, 0)]


def division(engines: Sequence[Engine], now: Split | None, champion: int, trial: Trial | None) -> Split | None:
    """How the requests are to be divided, after `now`.

    Engines of a version that is tried no more, and did not become the champion, get nothing as long as they have it.
    """
    if now is None or now.version in {champion, trial and trial.version.version}:
        left = False
    else:
        left = any(each.version == now.version for each in _up(engines))
    if now is not None and left:
        return now.withdrawn()
    return trial.split if trial else None


def _up(engines: Sequence[Engine]) -> list[Engine]:
    """Those that answer, or will in a moment, with the version that they have."""
    return [engine for engine in engines if engine.state in {EngineState.READY, EngineState.RELOADING}]
