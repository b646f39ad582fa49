"""Compares raters with each other every few seconds, and puts outliers into quarantine."""

import asyncio
from collections import Counter

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: Seconds from one comparison to the next, which there is if feedback has come meanwhile.
INTERVAL_S = 10.0


class RaterAssessment:
    """The explorer's part: once for the whole service."""

    def __init__(self, settings: Settings, ledger: Ledger, metrics: Metrics) -> None:
        self._options, self._trusted = settings.feedback, settings.feedback.all_trusted(settings.judge)
        self._ledger = ledger
        self._metrics = metrics

    async def run(self, interval_s: float = INTERVAL_S) -> None:
        """Compare for ever."""
        await every(interval_s, self.turn, task="raters", metrics=self._metrics)

    async def turn(self) -> None:
        """Compare once."""
        decided = await asyncio.to_thread(self._ledger.raters.assess, self._options, trusted=self._trusted)
        for each in decided:
            log.error("rater_quarantined", tenant=each.tenant, rater=each.name, reason=each.reason)
        states = Counter(each.state.value for each in await asyncio.to_thread(self._ledger.raters.all))
        for state in ("active", "quarantined"):
            self._metrics.raters.labels(state).set(states[state])
