"""Waits until a service has made of what was committed what it makes, and says why nothing happens."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tuneloop.runner.errors import ServiceAway, TuneFailed
from tuneloop.runner.tuning.services.service_client import ServiceClient, TrainingStatus

#: Seconds between two looks at what the service is doing.
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPatience:
    """Seconds that a step may make no progress, and that a service may be without a trainer meanwhile."""

    step_s: float = 3600.0
    trainer_s: float = 300.0


class Absorption:
    """What became of one service's commits."""

    def __init__(self, service: ServiceClient, patience: StepPatience, say: Callable[[str], None]) -> None:
        self._service, self._patience, self._say = service, patience, say
        self._expected = 0
        self.served = 0
        self._held: str | None = None

    async def until_served(self, before: TrainingStatus, *, settled: bool = False) -> bool:
        """Wait for the version of what was committed last, `before` which it was such; False if none came of it.

        `settled`: for all there is. Raises TuneFailed.
        """
        expected = self._expected = max(self._expected, before.newest) + 1
        since, last = time.monotonic(), before
        alone = _TrainersAbsence(self._service.url, self._patience.trainer_s, self._say)
        while True:
            status = await self._service.status()
            if (status.served >= expected and not settled) or status.settled:
                self._expected = max(status.served, before.newest)
                self.served = max(self.served, status.served)
                return status.served > before.served
            alone.note(is_up=status.trainer_up)
            if status.held and status.held != self._held:
                self._held = status.held
                self._say(f"the next step waits, for the service at {self._service.url} holds a version: {status.held}")
            if (status.newest, status.served, status.states) != (last.newest, last.served, last.states):
                since, last = time.monotonic(), status
            if time.monotonic() - since > self._patience.step_s:
                why = "; ".join(status.sentences)
                raise TuneFailed(
                    f"the service at {self._service.url} has made nothing for {self._patience.step_s:g} s of what was "
                    f"committed: {why}"
                )
            await asyncio.sleep(_LOOK_S)


class _TrainersAbsence:
    """Says when there is no trainer, and when there is one again; raises ServiceAway if there is none for too long."""

    def __init__(self, url: str, patience_s: float, say: Callable[[str], None]) -> None:
        self._url, self._patience_s, self._say = url, patience_s, say
        self._since: float | None = None

    def note(self, *, is_up: bool) -> None:
        """Take a look into account."""
        if is_up:
            if self._since is not None:
                self._say(f"the service at {self._url} has a trainer again")
            self._since = None
            return
        if self._since is None:
            self._since = time.monotonic()
            self._say(
                f"the service at {self._url} has no trainer, and what is committed waits: see its log, or "
                f"`tuneloop run` with mode train; stopping after {self._patience_s:g} s without one"
            )
        if time.monotonic() - self._since > self._patience_s:
            raise ServiceAway(f"the service at {self._url} had no trainer for {self._patience_s:g} s")
