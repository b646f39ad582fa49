"""What became of production calls and their shadow runs, by kind; and the first traceback of each kind of failure."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

#: In the order in which a call comes by.
KINDS = (
    "calls",  # of wrapped functions
    "strategy_failed",
    "selected",
    "dropped_not_copied",  # their inputs cannot be copied
    "dropped_too_large",  # their inputs take too long to copy
    "dropped_queue_full",
    "dropped_at_stop",
    "runs",  # shadow runs that began
    "runs_in_app",  # of them those that could not be sent to another process
    "shadow_failed",
    "shadow_timed_out",
    "service_away",  # it failed to answer a run, whatever the agent made of that
    "completed",
    "reward_failed",
    "unrewarded",  # the calculator said None
    "feedback_failed",
    "rewarded",
    "commits",
    "commit_failed",
    "runner_failed",  # by a fault of ours
)

log = logging.getLogger("tuneloop.runner.production")


class ShadowCounts:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._logged: set[str] = set()

    def add(self, kind: str, count: int = 1) -> None:
        """Count something of a kind."""
        with self._lock:
            self._counts[kind] += count

    def snapshot(self) -> dict[str, int]:
        """All of them, those too that are 0."""
        with self._lock:
            return dict(self._counts)

    def fail(self, kind: str, error: BaseException) -> None:
        """Count a failure; the first of its kind is logged with its traceback."""
        self.add(kind)
        with self._lock:
            first = kind not in self._logged
            self._logged.add(kind)
        if first:
            log.warning("%s: %r; further ones are counted, not logged", kind, error, exc_info=error)

    @contextmanager
    def harmless(self, kind: str, known: Mapping[type[Exception], str] = MappingProxyType({})) -> Iterator[None]:
        """Count whatever the block raises, as of a kind of its own if it is `known`, and go on behind it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the app must not feel what goes wrong here
            self.fail(known.get(type(error), kind), error)
