"""Looks at the ledger now and then: the gauges of /metrics and the curves of what was served."""

import asyncio
from pathlib import Path

import structlog

from explorer.metrics import Metrics
from shared.curves import Curves
from shared.errors import LedgerError
from shared.ledger import Ledger, VersionReward

log = structlog.get_logger()


class Watch:
    """Writes per served version, at step = version: `served/requests`, `served/rewarded`, `served/reward_mean`."""

    def __init__(self, ledger: Ledger, metrics: Metrics, *, folder: Path, interval_s: float) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._curves = Curves(folder)
        self._interval_s = interval_s
        self._written: dict[int, tuple[int, int, float]] = {}

    async def run(self) -> None:
        """Look every `interval_s` seconds, for ever."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except LedgerError as error:  # the database is away
                log.warning("not_looked", reason=str(error))
            await asyncio.sleep(self._interval_s)

    def look(self) -> None:
        """Bring gauges and curves up to date."""
        for state, count in self._ledger.counts().items():
            self._metrics.experiences.labels(state.value).set(count)
        imbalance = self._ledger.imbalance()
        for sentence in imbalance:
            log.error("ledger_imbalance", sentence=sentence)
        self._metrics.ledger_imbalance.set(len(imbalance))
        for served in self._ledger.rewards():
            now = (served.replies, served.rewarded, served.reward_sum)
            if self._written.get(served.version) != now and self._curves.add(served.version, _points(served)):
                self._written[served.version] = now

    def close(self) -> None:
        """Close the curves."""
        self._curves.close()


def _points(served: VersionReward) -> dict[str, float]:
    points: dict[str, float] = {"served/requests": served.replies, "served/rewarded": served.rewarded}
    if served.rewarded:
        points["served/reward_mean"] = served.reward_sum / served.rewarded
    return points
