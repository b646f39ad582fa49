"""Lets the explorer forget: what the settings no longer allow to keep, and the outbox files when a person is erased."""

import asyncio
import time
from collections.abc import Callable

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.ledger.recording.retention import PURGEABLE, Person, Retention, bounds_of, bounds_of_tenants
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: How often the settings' retention is applied.
PURGE_S = 3600.0


class Forgetting:
    def __init__(
        self,
        settings: Settings,
        retention: Retention,
        forget_files: Callable[[], None],
        *,
        metrics: Metrics,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bounds, self._of_tenants = bounds_of(settings.retention), bounds_of_tenants(settings)
        self._retention, self._forget_files, self._metrics = retention, forget_files, metrics
        self._purged = {state: metrics.purged.labels(state.value) for state in PURGEABLE}
        self._interval_s, self._clock = interval_s, clock
        self._purge_at = clock()
        self._erased: dict[Person, float] = {}

    async def run(self) -> None:
        await every(self._interval_s, self.look, task="retention", metrics=self._metrics)

    async def look(self) -> None:
        """Forget what is to be forgotten by now. Raises LedgerUnavailable."""
        erased = await asyncio.to_thread(self._retention.erasures)
        if erased != self._erased:
            self._forget_files()
        self._erased = erased
        if (self._bounds or self._of_tenants) and self._clock() >= self._purge_at:
            await asyncio.to_thread(self._purge)
            self._purge_at = self._clock() + PURGE_S

    def _purge(self) -> None:
        for state, count in self._retention.purge(self._bounds, of_tenants=self._of_tenants).experiences.items():
            self._purged[state].inc(count)
            if count:
                log.info("experiences_purged", state=state.value, count=count)
