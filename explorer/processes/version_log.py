"""Says what was decided about versions, whoever decided: one line of the log and one count for each event."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.experience import VersionAction
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.versions.versions import VersionEvent
from tuneloop.shared.telemetry.spans import FinishedSpan, new_span, span_of_version

log = structlog.get_logger()

#: Actions that somebody decided on. What follows from one of them for other versions, such as that they retire, is in
#: the table only.
DECISIONS = (
    VersionAction.CANARY,
    VersionAction.PROMOTED,
    VersionAction.ROLLED_BACK,
    VersionAction.REJECTED,
    VersionAction.PINNED,
    VersionAction.UNPINNED,
)

_ANNOUNCED = "announced"

#: Those after which a version is not served although somebody thought that it could be.
_AGAINST = frozenset({VersionAction.ROLLED_BACK, VersionAction.REJECTED})


class VersionLog:
    """Follows the decisions in `version_events`; the explorer that first notes one in the ledger announces it."""

    def __init__(
        self,
        ledger: Ledger,
        metrics: Metrics,
        *,
        interval_s: float,
    ) -> None:
        #: Called with each decision that is told, too.
        self.tell: Callable[[VersionEvent], None] = lambda event: None
        self._versions, self._explorers = ledger.versions, ledger.explorers
        self._metrics = metrics
        self._interval_s = interval_s
        self._seen: int | None = None
        self._champion = 0

    async def run(self) -> None:
        update = partial(asyncio.to_thread, self.update)
        await every(self._interval_s, update, task="version_log", metrics=self._metrics)

    def update(self) -> None:
        if self._seen is None:
            told = self._explorers.counts(_ANNOUNCED).get("", self._versions.last_event(DECISIONS))
            self._seen = int(told)
            self._explorers.advance(_ANNOUNCED, self._seen)
            promoted = self._versions.events_since(0, (VersionAction.PROMOTED,))
            self._champion = next((each.version for each in reversed(promoted) if each.id <= self._seen), 0)
        for event in self._versions.events_since(self._seen, DECISIONS):
            before = self._explorers.advance(_ANNOUNCED, event.id)
            self._seen = event.id
            self._tell(event, anew=before is None or event.id > before)

    def _tell(self, event: VersionEvent, *, anew: bool) -> None:
        if anew:
            fields: dict[str, Any] = {"version": event.version, "from_version": self._champion}
            say = log.warning if event.action in _AGAINST else log.info
            say(f"version_{event.action}", **fields, by=event.actor, reason=event.reason or "", event_id=event.id)
            self._metrics.version_decisions.labels(event.action.value, event.actor.partition(":")[0]).inc()
            self.tell(event)
        if event.action is VersionAction.PROMOTED:
            self._champion = event.version


def decision_span(event: VersionEvent, experiment: str) -> FinishedSpan:
    at, reason = int(event.at * 1_000_000_000), event.reason or ""
    return FinishedSpan(
        name=f"version {event.action.value}",
        id=new_span(),
        started_ns=at,
        ended_ns=at,
        attributes={"tuneloop.version": event.version, "tuneloop.by": event.actor, "tuneloop.reason": reason},
        links=[span_of_version(experiment, event.version)],
    )
