"""The ledger's counts for the page: counted behind its back, for what they cost grows with the ledger."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from tuneloop.shared import steady_time
from tuneloop.shared.ledger.facts import Facts, LedgerFacts, Rules
from tuneloop.shared.ledger.ledger import BatchPolicy, Ledger
from tuneloop.shared.operations.doctor import MAX_DROP_REASONS
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.spool_format import spool_status

#: Counts are at least so old before they are made anew, and so many times as old as it takes to make them.
_INTERVAL_S, _INTERVAL_COUNTS = 5.0, 20.0

#: How long a page waits for counts that are being made: those of a small ledger are there by then.
_PATIENCE_S = 0.05


class NewestCounts(NamedTuple):
    """The newest counts and when they were made; `counting`: newer ones are being made. No facts: the first are."""

    facts: Facts | None
    counted_at: float
    counting: bool


class _Count(NamedTuple):
    facts: LedgerFacts
    counted_at: float
    ended: float
    seconds: float


class LedgerCounts:
    """The newest counts, at once. Who asks for old ones has them made anew, once for all who ask."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        *,
        patience_s: float = _PATIENCE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is the clock by which counts grow old."""
        self._settings, self._ledger = settings, ledger
        self._patience_s, self._now = patience_s, now
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "ledger-counts")
        self._running: Future[_Count] | None = None
        self._newest: _Count | None = None

    def get(self) -> NewestCounts:
        """What is known, after a moment's patience. Raises what the last attempt to count did."""
        with self._lock:
            last = self._newest
            due = last is None or self._now() - last.ended >= max(_INTERVAL_S, _INTERVAL_COUNTS * last.seconds)
            if self._running is None and due:
                self._running = self._thread.submit(self._count)
            running = self._running
        if running is not None:
            wait([running], self._patience_s)
        with self._lock:
            if running is not None and running.done() and running is self._running:
                self._running = None
                self._newest = running.result()
            newest, counting = self._newest, self._running is not None
        if newest is None:
            return NewestCounts(None, 0.0, counting)
        facts = Facts(
            now=newest.counted_at,  # what was silent for long by now may have been heard of since
            rules=Rules.of(self._settings),
            spool=spool_status(self._settings.spool_dir),
            ledger=newest.facts,
        )
        return NewestCounts(facts, newest.counted_at, counting)

    def _count(self) -> _Count:
        at, began = steady_time.now(), self._now()
        facts = self._ledger.reports.facts(
            BatchPolicy.of(self._settings), drops=MAX_DROP_REASONS, batch=Rules.of(self._settings).least
        )
        ended = self._now()
        return _Count(facts, at, ended, ended - began)
