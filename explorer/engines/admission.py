"""Bounds concurrency: so many requests in flight, so many that wait for that, and 429 for all beyond."""

import asyncio
import contextlib
from collections import deque

from tuneloop.shared.errors import RequestRefused


class Admission:
    """A bounded number of requests in flight, and a bounded first-in-first-out queue of those that wait."""

    def __init__(self, *, limit: int, max_waiting: int, wait_timeout_s: float) -> None:
        self._free = limit
        self._limit = limit
        self._max_waiting = max_waiting
        self._wait_timeout_s = wait_timeout_s
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""
        return self._limit - self._free

    @property
    def waiting(self) -> int:
        """Requests that wait to be answered."""
        return len(self._queue)

    async def acquire(self) -> None:
        """Count one more request in flight, or wait. Raises RequestRefused if too many wait, or for too long."""
        if self._free:
            self._free -= 1
            return
        if len(self._queue) >= self._max_waiting:
            raise RequestRefused(
                f"{self._limit} requests are in flight and {len(self._queue)} wait; try again later",
                status=429,
                code="too_many_requests",
                retry_after_s=1.0,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release()  # the turn had been granted already
            else:
                with contextlib.suppress(ValueError):
                    self._queue.remove(turn)
            if isinstance(error, TimeoutError):
                raise RequestRefused(
                    f"too many requests are in flight: this one waited for {self._wait_timeout_s:g} seconds",
                    status=503,
                    code="overloaded",
                    retry_after_s=1.0,
                ) from None
            raise

    def release(self) -> None:
        """Count one request less in flight, and let the next one proceed."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():  # else the waiting request has just been cancelled
                turn.set_result(None)
                return
        self._free += 1
