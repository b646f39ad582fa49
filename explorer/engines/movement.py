"""Whether an engine works: what is seen of its processes, of its counters, and of what it sends."""

import time

from tuneloop.explorer.engines.vllm import EngineControl
from tuneloop.shared.process_time import cpu_seconds

#: An engine that has sent nothing for so many seconds is asked for its counters.
_ASK_S = 10.0

#: Over so many seconds at least it is looked at whether processes compute, which they do for this part of the time.
_OVER_S, _WORKS = 5.0, 0.02


class EngineMovement:
    """What is seen of one engine: `still_s` without a sign of work. `pid` is that of its guard."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.still_s = self._cpu_s = self._looked_at = self._steps = 0.0
        self._moved_at, self._seen = time.monotonic(), ("", 0)
        self._worked_at = self._sent_at = float("-inf")

    async def look(self, state: str, control: EngineControl, *, quiet_s: float | None) -> None:
        """Look again. `quiet_s`: how long it has sent nothing to requests that wait; None where none does."""
        now = time.monotonic()
        if self.pid is not None and now - self._looked_at >= _OVER_S:
            spent = cpu_seconds(self.pid)
            self._worked_at = now if spent - self._cpu_s >= _WORKS * (now - self._looked_at) else self._worked_at
            self._cpu_s, self._looked_at = spent, now
        if quiet_s is not None:
            self._sent_at = max(self._sent_at, now - quiet_s)
        if (seen := (state, control.answered)) != self._seen or (quiet_s is None and not control.calls):
            self._moved_at, self._seen = now, seen
        self._moved_at = max(self._moved_at, self._sent_at, self._worked_at if state == "reloading" else 0.0)
        if state == "ready" and now - self._moved_at >= _ASK_S:
            steps = await control.steps()
            if steps is None:  # because it is busy, or stands still
                self._moved_at = max(self._moved_at, self._worked_at)
            elif steps != self._steps:
                self._steps, self._moved_at = steps, now
        self.still_s = now - self._moved_at

    def is_busy(self, since: float) -> bool:
        """Whether it has computed, or sent something, since a moment."""
        return max(self._worked_at, self._sent_at) > since
