"""Which replies engines are asked to tell log-probabilities of; the trainer recomputes those of the others.

By a hash of the reply's name, so that nobody chooses. While the alarm is open that the two are not the same, all.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.engines.fleet import in_share
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.ledger.versions.alarms import Alarms
from tuneloop.shared.operations.diagnosis import CAPTURE_MISMATCH
from tuneloop.shared.settings.serving import CaptureSettings

log = structlog.get_logger()

#: How often the alarm is looked for.
_LOOK_S = 5.0


class CaptureChoice:
    """The settings' share of replies, or all while `mistrusted`."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._all = settings.logprobs == "all"
        self._share = settings.captured_share
        self.mistrusted = False

    def asks(self, msg_id: str, upstream: Mapping[str, Any]) -> bool:
        """Whether the engine is asked for the log-probabilities of the reply to a request."""
        wanted = upstream.get("logprobs")  # of a text, 0 is a number of them
        if self._all or self.mistrusted or not (wanted is None or wanted is False):
            return True
        return in_share(b"captured", msg_id, self._share)

    async def watch(self, alarms: Alarms, metrics: Metrics) -> None:
        """Look for the alarm for ever."""

        async def look() -> None:
            raised = await asyncio.to_thread(alarms.all)
            mistrusted = any(alarm.name == CAPTURE_MISMATCH for alarm in raised)
            if mistrusted != self.mistrusted:
                log.warning("capture_switched", logprobs="all" if mistrusted else f"a share of {self._share:g}")
            self.mistrusted = mistrusted

        if not self._all:
            await every(_LOOK_S, look, task="capture", metrics=metrics)
