"""What one process's connections may take: how many there are, how long a request may come, what is held of bodies."""

import asyncio
import math
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuneloop.explorer.http.caller import Caller, Meter
from tuneloop.shared.errors import RequestRefused

#: What is written of an answer at once. More is written when its client has read most of this.
PIECE_BYTES = 64 << 10

#: How many turns of the event loop lie between two requests, or replies, of one caller while there are others.
_LOOP_TURNS = 4
#: Who has been the only caller for so long is alone.
_ALONE_S = 1.0

_HEAD_ENDS = b"\r\n\r\n"

#: Where a scope has its request's share.
_SCOPE_KEY = "tuneloop.share"

#: Descriptors that are left for the spool, the database, engines and logs.
_RESERVED_DESCRIPTORS = 256

#: What begins with one descriptor must still be able to serve somebody.
_FEWEST_CONNECTIONS = 16


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, open as many files as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """How many files this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def most_connections(wanted: int | None, descriptors: int) -> int:
    """The connections that fit into `descriptors`, at most `wanted` of them.

    >>> most_connections(None, 1024), most_connections(100, 1024), most_connections(None, 64)
    (768, 100, 16)
    """
    room = max(descriptors - _RESERVED_DESCRIPTORS, _FEWEST_CONNECTIONS)
    return room if wanted is None else min(wanted, room)


class LoopTurns:
    """Lets one request of each caller begin, or one of its replies be taken up, in each turn of the event loop.

    What comes at once of a caller, such as replies that end together and the next requests then, would stand before
    everything that the loop has to do for others. Where there are others, each has one in some turns: what a thread or
    the control process answers takes a few of them until its request goes on.
    """

    def __init__(self) -> None:
        self._had_theirs: set[str] = set()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._last, self._changed_at = "", -math.inf

    async def take(self, who: str) -> None:
        """Wait until one of this caller's may go on."""
        if who != self._last:
            self._last, self._changed_at = who, time.monotonic()
        if who not in self._had_theirs:
            self._give(who)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        await turn

    def _give(self, who: str) -> None:
        if not self._had_theirs:
            alone = time.monotonic() - self._changed_at > _ALONE_S
            asyncio.get_running_loop().call_soon(self._next, 1 if alone else _LOOP_TURNS)
        self._had_theirs.add(who)

    def _next(self, left: int) -> None:
        if left > 1:
            asyncio.get_running_loop().call_soon(self._next, left - 1)
            return
        self._had_theirs.clear()
        for who, waiting in list(self._waiting.items()):
            turn = waiting.popleft()
            if not waiting:
                del self._waiting[who]
            if not turn.cancelled():
                turn.set_result(None)
            self._give(who)


@dataclass(eq=False)
class ConnectionLimits:
    """The bounds of a process's connections, and what they take now.

    `idle` has those that wait for a request, or have sent a part of its head: the first has waited longest. Where
    there is no room for another connection, it is closed. `held_bytes` are those of bodies whose requests are not over,
    and of large answers that are being sent; `held_by` has them by key and by tenant.
    """

    max_connections: int = 1 << 16
    max_held_bytes: int = 512 << 20
    head_timeout_s: float = 30.0
    body_timeout_s: float = 300.0
    read_timeout_s: float = 60.0  # in which a client must read something of what is sent
    turns: LoopTurns = field(default_factory=LoopTurns)
    idle: dict["ConnectionWatch", None] = field(default_factory=dict)
    held_bytes: int = 0
    held_by: Counter[str] = field(default_factory=Counter)

    def has_room(self, holders: Sequence[str], size: int) -> bool:
        """Whether so many bytes more may be held for a caller.

        With them his key and his tenant together would hold no more than is left to all others now. So nobody who ends
        none of his requests, or reads none of his answers, takes the room that others need: no key that of its
        tenant's other keys, and no tenant, however many keys it has, that of another.
        """
        return sum(self.held_by[each] for each in holders) + size <= self.max_held_bytes - self.held_bytes

    def hold(self, holders: Sequence[str], size: int) -> None:
        """Count bytes that are held for a caller."""
        self.held_bytes += size
        for each in holders:
            self.held_by[each] += size

    def give_back(self, holders: Sequence[str], size: int) -> None:
        """Count them no more."""
        self.held_bytes -= size
        for each in holders:
            self.held_by[each] -= size
            if not self.held_by[each]:
                del self.held_by[each]

    def make_room(self, connections: int) -> bool:
        """Close an idle connection if there are more than are allowed; False if all of them are at work."""
        if connections <= self.max_connections:
            return True
        if not self.idle:
            return False
        next(iter(self.idle)).evict()
        return True


class RequestShare:
    """What a request takes of its worker's bounds and of its key's.

    It is over when it is answered or, where its client has left before that, when the work for it has ended. `abort`
    breaks off its connection.
    """

    def __init__(
        self, limits: ConnectionLimits, abort: Callable[[], None] = lambda: None, before: "RequestShare | None" = None
    ) -> None:
        """Until it begins, its bytes are those of who sent the request `before` it on its connection."""
        self._limits = limits
        self.read_timeout_s = limits.read_timeout_s
        self.abort = abort
        self._who: str = before._who if before is not None else ""
        self._holders: Sequence[str] = before._holders if before is not None else ("",)
        self._meter: Meter | None = None
        self._bytes = 0
        self._open = True
        self._users = 1

    def begin(self, caller: Caller) -> None:
        """Its answer begins: it counts as one of its key's, with what has come of its body."""
        self._limits.give_back(self._holders, self._bytes)
        self._meter, self._who, self._holders = caller.meter, caller.identity, caller.holders
        self._limits.hold(self._holders, self._bytes)
        caller.meter.begin_request()
        caller.meter.count_bytes(self._bytes)

    async def take_turn(self) -> None:
        """Wait while others of its caller's go on, so that other callers have turns between them."""
        await self._limits.turns.take(self._who)

    def hold(self, size: int) -> RequestRefused | None:
        """So many bytes of its body have come; the refusal, if there is no room for them."""
        if not self._open:  # nobody keeps what still comes
            return None
        if self._meter is not None:
            self._meter.count_bytes(size)
        return self._take(size)

    def hold_answer(self, size: int) -> RequestRefused | None:
        """An answer of so many bytes is to be sent; the refusal, if there is no room for it."""
        return self._take(size)

    def _take(self, size: int) -> RequestRefused | None:
        if not self._limits.has_room(self._holders, size):
            reason = "requests and answers of this key, or its tenant, are too large together; read what is answered"
            return RequestRefused(reason, status=503, code="overloaded", retry_after_s=1.0)
        self._bytes += size
        self._limits.hold(self._holders, size)
        return None

    def end(self) -> None:
        """It is over, unless it was before."""
        if not self._open:
            return
        self._open = False
        if self._meter is not None:
            self._meter.end_request()
        self.release()

    def keep(self) -> None:
        """Its body is held for work that goes on when it is answered, until `release`."""
        self._users += 1

    def release(self) -> None:
        """That work has ended."""
        self._users -= 1
        if not self._users:
            self._limits.give_back(self._holders, self._bytes)


def open_share(scope: Any, limits: ConnectionLimits, abort: Callable[[], None], before: Any = None) -> None:
    """Begin the share of the request of a scope, which comes after that of the scope `before` on its connection."""
    scope[_SCOPE_KEY] = RequestShare(limits, abort, None if before is None else share_of(before))


def find_share(scope: Any) -> RequestShare | None:
    """The share of the request of a scope, if it came through our server."""
    found: RequestShare | None = scope.get(_SCOPE_KEY)
    return found


def share_of(scope: Any) -> RequestShare:
    """The share of the request of a scope."""
    found: RequestShare = scope[_SCOPE_KEY]
    return found


class HeadBytes:
    """Counts the bytes of the head that is being read: not those of requests that were complete before it."""

    def __init__(self) -> None:
        self._bytes = 0
        self.of_body = 0  # what came since the last head
        self.message_ended = False

    def count(self, data: bytes, *, is_read: bool) -> int:
        """How long it is, after this data, with which a body may have come and a message ended; `is_read` if one is."""
        if is_read and self.message_ended:  # rather too little than too much, where the body came in chunks
            before = data.rfind(_HEAD_ENDS) + len(_HEAD_ENDS) if _HEAD_ENDS in data else 0
            self._bytes = max(0, len(data) - before - self.of_body)
        elif is_read and not self.of_body:
            self._bytes += len(data)
        else:
            self._bytes = 0
        self.of_body, self.message_ended = 0, False
        return self._bytes


class ConnectionWatch:
    """Bounds one connection; `refuse` answers what comes on it with a refusal and closes it, `evict` only closes it."""

    def __init__(
        self, limits: ConnectionLimits, refuse: Callable[[RequestRefused], None], evict: Callable[[], None]
    ) -> None:
        self.limits = limits
        self._refuse: Callable[[RequestRefused], object] = refuse
        self._evict: Callable[[], object] = evict
        self._timer: asyncio.TimerHandle | None = None
        self._awaited = ""
        self._head_begun = False

    def evict(self) -> None:
        """Close the connection, which waits for a request in vain."""
        self.limits.idle.pop(self, None)
        self._evict()

    def wait_for_head(self, *, begun: bool) -> None:
        """The connection is open for a request, whose head may have `begun`."""
        self.limits.idle.setdefault(self)
        self._head_begun = begun
        self._expect("head", self.limits.head_timeout_s)

    def wait_for_nothing(self) -> None:
        """Whatever there is to read of a request has come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wait_for_body(self) -> None:
        """A part of a body has come, and it is not the last one."""
        self._expect("body", self.limits.body_timeout_s)

    def begin_request(self) -> None:
        """A head is complete."""
        self.limits.idle.pop(self, None)

    def wait_for_refusal(self) -> None:
        """The answer, a refusal, is held back: the connection may make room for another meanwhile."""
        self.limits.idle.setdefault(self)

    def end_request(self) -> None:
        """A response is complete, and the next request may come."""
        self.limits.idle.setdefault(self)

    def close(self) -> None:
        """The connection is gone."""
        self.wait_for_nothing()
        self.limits.idle.pop(self, None)
        self._refuse = self._evict = _do_nothing  # else the two would hold each other

    def _expect(self, what: str, timeout_s: float) -> None:
        if self._timer is not None:
            if self._awaited == what:
                return
            self._timer.cancel()
        self._awaited = what
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self._awaited == "head" and not self._head_begun:
            self.evict()
            return
        reason = f"the {'headers' if self._awaited == 'head' else 'body'} did not come in time"
        self._refuse(RequestRefused(reason, status=408, code=f"{self._awaited}_timeout"))


def _do_nothing(*_: object) -> None:
    pass
