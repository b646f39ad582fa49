"""Bounds concurrency: so many requests in flight, so many that wait for that, and 429 for all beyond.

Tenants share the places, and the callers of each share its own: whoever has the least in flight is next, and its own
requests come in their order. Where no more may wait, those give way who have the most waiting.
"""

import asyncio
from collections import Counter, deque

from tuneloop.shared.errors import RequestRefused

_Turn = asyncio.Future[None]


class Admission:
    """A bounded number of requests in flight, and a bounded queue, fair between callers, of those that wait."""

    def __init__(self, *, limit: int, max_waiting: int, wait_timeout_s: float) -> None:
        self._free = limit
        self._limit = limit
        self._max_waiting = max_waiting
        self._wait_timeout_s = wait_timeout_s
        self._queues: dict[str, deque[_Turn]] = {}
        self._in_flight_of: Counter[str] = Counter()
        self._of_tenant: Counter[str] = Counter()
        self.waiting = 0

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""
        return self._limit - self._free

    async def acquire(self, caller: str = "") -> None:
        """Count one more request in flight, or wait. Raises RequestRefused if too many wait, or for too long."""
        if self._free:
            self._count(caller, 1)
            return
        if self.waiting >= self._max_waiting:
            self._make_room(caller)
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(caller, deque()).append(turn)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                if turn.exception() is None:
                    self.release(caller)  # the turn had been granted already
            else:
                queue = self._queues.get(caller)
                if queue is not None and turn in queue:
                    queue.remove(turn)
                    self._tidy(caller)
            if isinstance(error, TimeoutError):
                raise RequestRefused(
                    f"too many requests are in flight: this one waited for {self._wait_timeout_s:g} seconds",
                    status=503,
                    code="overloaded",
                    retry_after_s=1.0,
                ) from None
            raise

    def release(self, caller: str = "") -> None:
        """Count one request of a caller less in flight, and let the next one proceed."""
        self._count(caller, -1)
        while self._queues:
            # The tenant that has the least in flight, and of it the caller; of several the one that waits longest.
            following = min(
                self._queues, key=lambda each: (self._of_tenant[_tenant_of(each)], self._in_flight_of[each])
            )
            turn = self._pop(following, first=True)
            if not turn.done():  # else the waiting request has just been cancelled
                self._count(following, 1)
                turn.set_result(None)
                return

    def _make_room(self, caller: str) -> None:
        """Refuse the last one of who has the most waiting. Raises RequestRefused if that is the caller."""
        refusal = RequestRefused(
            f"{self._limit} requests are in flight and {self.waiting} wait; try again later",
            status=429,
            code="too_many_requests",
            retry_after_s=1.0,
        )
        waiting: Counter[str] = Counter()
        for each, queue in self._queues.items():
            waiting[_tenant_of(each)] += len(queue)
        own = _tenant_of(caller)
        tenant = max(waiting, key=waiting.__getitem__, default=own)
        if waiting[tenant] <= 1 + waiting[own]:
            tenant = own
        of_tenant = {each: len(queue) for each, queue in self._queues.items() if _tenant_of(each) == tenant}
        most = max(of_tenant, key=of_tenant.__getitem__, default=caller)
        if tenant == own and of_tenant.get(most, 0) <= 1 + of_tenant.get(caller, 0):
            raise refusal
        turn = self._pop(most, first=False)
        if not turn.done():
            turn.set_exception(refusal)

    def _count(self, caller: str, change: int) -> None:
        self._free -= change
        for counts, name in ((self._in_flight_of, caller), (self._of_tenant, _tenant_of(caller))):
            counts[name] += change
            if not counts[name]:
                del counts[name]

    def _pop(self, caller: str, *, first: bool) -> _Turn:
        queue = self._queues[caller]
        turn = queue.popleft() if first else queue.pop()
        self._tidy(caller)
        return turn

    def _tidy(self, caller: str) -> None:
        """One less waits; who goes on waiting goes behind the others who have as much in flight."""
        self.waiting -= 1
        if queue := self._queues.pop(caller):
            self._queues[caller] = queue


def _tenant_of(caller: str) -> str:
    return caller.partition("/")[0]
