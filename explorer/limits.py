"""The limits of a worker: on connections, requests in flight, held bytes, and what each key takes in a minute."""

import asyncio
import math
import os
import resource
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.ledger.keys import KeyLimits

if TYPE_CHECKING:
    from tuneloop.explorer.transcript import Transcript

#: What is written of an answer at once. More is written when its client has read most of this.
PIECE_BYTES = 64 << 10

#: Of text, for which an engine returned no tokens.
BYTES_A_TOKEN = 4

#: The assumed speed of sampling of a reply that the client did not wait for.
_TOKENS_PER_S = 50

_MINUTE_S = 60.0

#: Until a place is likely to be free.
_RETRY_S = 1.0

#: Descriptors that are left for the outbox, the database, engines and logs; the fewest connections with few of them.
_RESERVED_DESCRIPTORS, _FEWEST_CONNECTIONS = 256, 16

Receive = Callable[[], Awaitable[Any]]

#: Where a scope has its meter.
METER_KEY = "tuneloop.meter"


@dataclass(eq=False)
class ConnectionLimits:
    """The bounds of a process's connections. `idle` has those without a request, the one that waits longest first."""

    max_connections: int = 1 << 16
    head_timeout_s: float = 30.0
    read_timeout_s: float = 60.0  # in which a client must read something of what is sent
    idle: dict[Any, None] = field(default_factory=dict)


def most_connections(wanted: int | None) -> int:
    """The connections that fit into this process's file descriptors, at most `wanted` of them."""
    room = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _RESERVED_DESCRIPTORS, _FEWEST_CONNECTIONS)
    return room if wanted is None else min(wanted, room)


def descriptors_left() -> int:
    """About how many more files this process can open: the system gives the lowest number that is free."""
    with suppress(OSError), open(os.devnull) as file:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - file.fileno()
    return 0


def raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(eq=False)
class BodyLimits:
    max_held_bytes: int = 512 << 20
    body_timeout_s: float = 300.0
    held_bytes: int = 0


class KeyUsage(msgspec.Struct):
    requests: int = 0
    tokens: int = 0
    feedback: int = 0
    concurrent: int = 0


class Bucket:
    __slots__ = ("_at", "_per_s", "capacity", "level")

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = self.level = float(per_minute)
        self._per_s = per_minute / _MINUTE_S
        self._at = now

    def fill(self, now: float) -> float:
        self.level = min(self.capacity, self.level + (now - self._at) * self._per_s)
        self._at = now
        return self.level

    def wait_s(self, amount: float) -> float:
        """The seconds until so much can be taken."""
        return (amount - self.level) / self._per_s


class KeyMeter:
    def __init__(self, limits: KeyLimits) -> None:
        self.usage = KeyUsage()
        self._others = KeyUsage()
        self._max_concurrent = limits.max_concurrent
        rates = {name: getattr(limits, f"{name}_per_minute") for name in ("requests", "tokens", "feedback")}
        self._buckets = {name: Bucket(rate, time.monotonic()) for name, rate in rates.items() if rate is not None}

    def admit(self, *, brings_feedback: bool = False) -> None:
        """Count a request. Raises RequestRefused for one beyond a limit, feedback too before its body comes."""
        usage, now = self.usage, time.monotonic()
        if self._max_concurrent is not None and usage.concurrent + self._others.concurrent >= self._max_concurrent:
            raise _too_much(f"{self._max_concurrent} requests of this key are being answered", "concurrency", _RETRY_S)
        for name, bucket in self._buckets.items():
            level = bucket.fill(now)
            if (level <= 0 if name == "tokens" else level < 1) and (name != "feedback" or brings_feedback):
                raise _too_much(_sentence(name, bucket), name, bucket.wait_s(1))
        usage.requests += 1
        if (requests := self._buckets.get("requests")) is not None:
            requests.level -= 1

    def count_tokens(self, count: int) -> None:
        self.usage.tokens += count
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.level -= count

    def take_feedback(self, count: int) -> None:
        """So many events are to be stored. Raises RequestRefused where they are more than it may bring now."""
        if (bucket := self._buckets.get("feedback")) is not None:
            if bucket.fill(time.monotonic()) < count:
                wait_s = bucket.wait_s(min(count, bucket.capacity))
                raise _too_much(f"{_sentence('feedback', bucket)}, and these are {count}", "feedback", wait_s)
            bucket.level -= count
        self.usage.feedback += count

    def subtract_others(self, others: KeyUsage) -> None:
        for name, bucket in self._buckets.items():
            # A worker that ended takes its count with it: nothing is given back for that.
            bucket.level -= max(0, getattr(others, name) - getattr(self._others, name))
        self._others = others


def _sentence(name: str, bucket: Bucket) -> str:
    what = "events of feedback" if name == "feedback" else name
    return f"this key allows {bucket.capacity:.0f} {what} a minute"


def _too_much(message: str, what: str, wait_s: float) -> RequestRefused:
    return RequestRefused(
        f"{message}: try again later", status=429, code=f"key_limit_{what}", retry_after_s=max(wait_s, 0.05)
    )


class SharedUsage:
    def __init__(self) -> None:
        self._by_worker: dict[int, Mapping[str, KeyUsage]] = {}

    def exchange(self, worker: int, usage: Mapping[str, KeyUsage]) -> dict[str, KeyUsage]:
        self._by_worker[worker] = usage
        found: dict[str, KeyUsage] = {}
        for number, each in self._by_worker.items():
            for key_id, taken in each.items() if number != worker else ():
                sums = found.setdefault(key_id, KeyUsage())
                for name in KeyUsage.__struct_fields__:
                    setattr(sums, name, getattr(sums, name) + getattr(taken, name))
        return found

    def retire(self, worker: int) -> None:
        self._by_worker.pop(worker, None)


class RequestMeter:
    """What one request takes of its key's and its worker's limits, given back when all work for it has ended."""

    def __init__(self, limits: BodyLimits, key: KeyMeter) -> None:
        self._limits, self._key = limits, key
        self._held_bytes, self._users, self._is_counted, self._asked_at = 0, 1, False, math.inf
        self._body_bytes, self._choices = 0, 1
        self._most: int | None = None
        self._is_streamed = False
        key.usage.concurrent += 1

    def receiver(self, receive: Receive) -> Receive:
        """ASGI's `receive` within the limits: it raises RequestRefused for a body that is slow, or has no room."""
        until, is_whole = asyncio.get_running_loop().time() + self._limits.body_timeout_s, False

        async def receive_bounded() -> Any:
            nonlocal is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(until) as timeout:
                    if self._is_streamed:
                        timeout.reschedule(asyncio.get_running_loop().time() + self._limits.body_timeout_s)
                    message = await receive()
            except TimeoutError:
                raise RequestRefused("the body did not come in time", status=408, code="body_timeout") from None
            self.hold(0 if self._is_streamed else len(message.get("body", b"")))
            is_whole = not message.get("more_body", False)
            return message

        return receive_bounded

    def begin_stream(self) -> None:
        """The body goes to disk as it comes: it is not held, and each piece of it has the time of a whole one."""
        self._is_streamed = True

    def hold(self, size: int) -> None:
        """Count bytes that are held for it: of its body, of what it names, or of its answer. Raises RequestRefused."""
        if self._limits.held_bytes + size > self._limits.max_held_bytes:
            reason = "requests and answers are too large together now; read what is answered, and try again in a moment"
            raise RequestRefused(reason, status=503, code="overloaded", retry_after_s=1.0)
        self._held_bytes += size
        self._limits.held_bytes += size

    def keep(self) -> None:
        """It is held for work that goes on when it is answered, until `release`."""
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            self._key.usage.concurrent -= 1
            self._limits.held_bytes -= self._held_bytes

    def expect(self, *, body_bytes: int, choices: int, most: object) -> None:
        """What tokens are estimated by where an engine returns none: `most` of each choice, if the client says so."""
        self._body_bytes, self._choices, self._most = body_bytes, choices, most if isinstance(most, int) else None

    @contextmanager
    def while_asking(self, transcript: "Transcript") -> Iterator[None]:
        """An engine is asked meanwhile; what is broken off is counted as far as it has come."""
        self._asked_at = time.monotonic()
        try:
            yield
        except asyncio.CancelledError:  # a time limit, too
            if self._users == 1:  # else the engine goes on without the client, and its end is counted
                self.count_tokens(transcript, broken_off=True)
            raise

    def count_tokens(self, transcript: "Transcript", *, broken_off: bool = False) -> None:
        """Count the tokens of a reply as far as it has come, once; `broken_off`: no client waited for the rest."""
        if self._is_counted:
            return
        self._is_counted = True
        tokens = transcript.tokens
        if not tokens:  # the engine returned none: an estimate
            sampled = 0
            if broken_off or transcript.broken:
                sampled = math.ceil(max(0.0, time.monotonic() - self._asked_at) * _TOKENS_PER_S)
            if self._most is not None:
                sampled = min(sampled, max(0, self._most))
            characters = sum(len(text) for choice in transcript.choices.values() for text in choice.text)
            tokens = tokens_of(self._body_bytes + characters) + sampled * self._choices
        self._key.count_tokens(tokens)


def tokens_of(size: int) -> int:
    return -(-size // BYTES_A_TOKEN)


class Admission:
    """Bounded places, a bounded queue, 429 beyond. Tenants, and callers of each, have turns by what they have."""

    def __init__(self, *, limit: int, max_waiting: int, wait_timeout_s: float) -> None:
        self._free = limit
        self._limit = limit
        self._max_waiting = max_waiting
        self._wait_timeout_s = wait_timeout_s
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        self._in_flight_of: Counter[str] = Counter()
        self._of_tenant: Counter[str] = Counter()
        self.waiting = 0

    @property
    def in_flight(self) -> int:
        return self._limit - self._free

    async def acquire(self, caller: str = "") -> None:
        """Count one more request in flight, or wait. Raises RequestRefused if too many wait, or for too long."""
        if self._free:
            self._count(caller, 1)
            return
        if self.waiting >= self._max_waiting:
            self._make_room(caller)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
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

    def _pop(self, caller: str, *, first: bool) -> asyncio.Future[None]:
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
