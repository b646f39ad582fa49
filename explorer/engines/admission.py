"""How many requests are answered at once, and how many may wait for that: what comes beyond is told to come again."""

import asyncio
import contextlib
from collections import deque

from tuneloop.shared.errors import RequestRefused


class Admission:
    """A bounded number of places, and a bounded queue of those who wait for one, first come first served."""

    def __init__(self, *, places: int, waiting: int, patience_s: float) -> None:
        self._free = places
        self._places = places
        self._most_waiting = waiting
        self._patience_s = patience_s
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def taken(self) -> int:
        """Requests that are being answered."""
        return self._places - self._free

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._queue)

    async def take(self) -> None:
        """Take a place, or wait for one. Raises RequestRefused if too many wait, or for too long."""
        if self._free:
            self._free -= 1
            return
        if len(self._queue) >= self._most_waiting:
            raise RequestRefused(
                f"{self._places} requests are being answered and {len(self._queue)} wait; come again later",
                status=429,
                code="too_many_requests",
                retry_after_s=1.0,
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            async with asyncio.timeout(self._patience_s):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self.give_back()  # it was ours already
            else:
                with contextlib.suppress(ValueError):
                    self._queue.remove(place)
            if isinstance(error, TimeoutError):
                raise RequestRefused(
                    f"no place became free for {self._patience_s:g} seconds",
                    status=503,
                    code="overloaded",
                    retry_after_s=1.0,
                ) from None
            raise

    def give_back(self) -> None:
        """Let the next one have the place."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():  # else whoever waited there has just gone
                place.set_result(None)
                return
        self._free += 1
