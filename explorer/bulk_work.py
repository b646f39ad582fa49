"""Work in threads: one piece of each owner at a time, and owners take turns, whether it is long or there is much."""

import asyncio
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from tuneloop.explorer.http.bodies import parse_object
from tuneloop.shared.errors import RequestRefused

_Result = TypeVar("_Result")

#: Two, so that one owner's longest piece keeps no other waiting. More would take the event loop its turns.
_THREADS = 2

#: For what is read of the database, each of which is short.
LOOKUP_THREADS = 4

#: How long a thread keeps the interpreter while another waits for it. A request waits so some ten times beside a thread
#: that is at work: with Python's 5 ms it takes 50 ms more.
TURN_S = 0.0005

#: The same in the control process, whose flusher is at work for milliseconds at a time while workers wait for what its
#: loop tells them. In a worker turns as short would cost a sixth of the requests that it can answer.
CONTROL_TURN_S = 0.00005

#: Bodies of more bytes and more commas than this are parsed by turns: 200,000 names take a tenth of a second, in which
#: nothing else is done. A picture, however large, does not.
_LARGE, _MANY = 256 << 10, 10_000


def take_short_turns(turn_s: float = TURN_S) -> None:
    """Let the threads of this process take turns often, so that who is quickly done does not wait for the others."""
    sys.setswitchinterval(turn_s)


def pages_of(identity: str) -> str:
    """The owner of what a caller's pages and reports read: his conversations do not wait for them.

    >>> pages_of("acme/web")
    'pages of acme/web'
    """
    return f"pages of {identity}"


class _Piece(NamedTuple):
    work: Callable[[], Any]
    done: "asyncio.Future[Any]"


class AmountAtWork:
    """How much each owner has at work, or waiting for it: without a bound one might have all that is held."""

    def __init__(self, what: str) -> None:
        """`what` names the requests of an owner, for who is refused."""
        self._what = what
        self._amounts: Counter[str] = Counter()

    def check(self, owner: str, amount: int, most: int) -> None:
        """Raise RequestRefused if with so much more it were more than `most`."""
        if self._amounts[owner] + amount > most:
            reason = f"{self._what} of this key are still being worked on; try again in a moment"
            raise RequestRefused(reason, status=503, code="overloaded", retry_after_s=1.0)

    @contextmanager
    def holding(self, owner: str, amount: int) -> Iterator[None]:
        """So much more is at work."""
        self._amounts[owner] += amount
        try:
            yield
        finally:
            self._amounts[owner] -= amount
            if not self._amounts[owner]:
                del self._amounts[owner]


class BulkWork:
    """Runs pieces of work for one event loop.

    Not in the loop's own threads: there who brings many pieces at once would have all of them.
    """

    def __init__(self, *, threads: int = _THREADS, rests: bool = False) -> None:
        """`rests` is for work that keeps the interpreter until it is done, such as parsing.

        One piece of it is done at a time, and each is followed by a rest as long as it took: there all else has a turn.
        """
        self._threads, self._rests, self._rests_until = 1 if rests else threads, rests, 0.0
        self._pool = ThreadPoolExecutor(self._threads, "bulk-work")
        self._waiting: dict[str, deque[_Piece]] = {}  # the first owner has waited longest for a turn
        self._busy: set[str] = set()

    async def run(self, owner: str, work: Callable[[], _Result]) -> _Result:
        """The result of `work`, when it is its turn; what was cancelled before that is not begun."""
        done: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(_Piece(work, done))
        self._begin()
        return await done

    def close(self) -> None:
        """End the threads; nothing may be waiting."""
        self._pool.shutdown()

    def _begin(self) -> None:
        while len(self._busy) < self._threads and (owner := self._next_owner()) is not None:
            pieces = self._waiting.pop(owner)
            piece = pieces.popleft()
            if pieces:
                self._waiting[owner] = pieces  # behind the others
            if piece.done.cancelled():
                continue
            self._busy.add(owner)
            task = self._pool.submit(self._do, piece.work)
            task.add_done_callback(partial(self._tell, asyncio.get_running_loop(), owner, piece))

    def _do(self, work: Callable[[], Any]) -> Any:
        if not self._rests:
            return work()
        time.sleep(max(0.0, self._rests_until - time.monotonic()))
        began = time.monotonic()
        try:
            return work()
        finally:
            self._rests_until = 2 * time.monotonic() - began

    def _next_owner(self) -> str | None:
        return next((each for each in self._waiting if each not in self._busy), None)

    def _tell(self, loop: asyncio.AbstractEventLoop, owner: str, piece: _Piece, task: "Future[Any]") -> None:
        """Called by the thread: a future of the loop would take one more turn of it."""
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(self._end, owner, piece, task)

    def _end(self, owner: str, piece: _Piece, task: "Future[Any]") -> None:
        self._busy.discard(owner)
        if not piece.done.cancelled():
            if (error := task.exception()) is not None:
                piece.done.set_exception(error)
            else:
                piece.done.set_result(task.result())
        self._begin()


class BodyParser:
    """Parses bodies: those that would keep the event loop for long by turns, with a rest after each."""

    def __init__(self) -> None:
        self._turns = BulkWork(rests=True)

    async def parse(self, data: bytes, owner: str) -> dict[str, Any]:
        """The JSON object in an owner's body. Raises RequestRefused if there is none."""
        if len(data) <= _LARGE or data.count(b",") <= _MANY:
            return parse_object(data)
        return await self._turns.run(owner, partial(parse_object, data))

    def close(self) -> None:
        """Nothing more will be parsed."""
        self._turns.close()
