"""What a key has taken of its limits: a bucket for each, which fills again in a minute.

Tokens are counted when they have come: their bucket may go below nothing, and then nobody is let in before it is
filled again. Other workers of the service take from the same key: what they took is subtracted a moment later.
"""

import time
from collections.abc import Callable

import msgspec

from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.ledger.keys import KeyLimits

_MINUTE_S = 60.0

#: So many refusals are answered at once, and so many more each minute; those beyond are held back for so long. One
#: costs little, but a client that goes on at once, over many connections, would have the service do nothing else.
_PROMPT_REFUSALS, HELD_S = 300, 1.0

#: Those that are held back are answered one after the other: over however many connections they come, others have
#: turns between them.
_BETWEEN_S, _LONGEST_HELD_S = 0.02, 20.0

#: Until a place is likely to be free.
_RETRY_S = 1.0


class KeyUsage(msgspec.Struct):
    """What one worker has let a key take since it started, and how many requests it is answering."""

    requests: int = 0
    tokens: int = 0
    feedback: int = 0
    bytes: int = 0
    concurrent: int = 0


class Bucket:
    """So much a minute, as much of it at once as a minute brings."""

    __slots__ = ("_at", "_per_s", "capacity", "level")

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = self.level = float(per_minute)
        self._per_s = per_minute / _MINUTE_S
        self._at = now

    def fill(self, now: float) -> float:
        """What can be taken now."""
        self.level = min(self.capacity, self.level + (now - self._at) * self._per_s)
        self._at = now
        return self.level

    def wait_s(self, amount: float) -> float:
        """The seconds until so much can be taken."""
        return (amount - self.level) / self._per_s


class PromptRefusals:
    """Decides which refusals of one caller are answered at once."""

    __slots__ = ("_bucket", "_clock", "_last")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bucket = Bucket(_PROMPT_REFUSALS, clock())
        self._last = 0.0

    def take(self, refusal: RequestRefused) -> None:
        """Have the answer held back if there were too many of late."""
        now = self._clock()
        if self._bucket.fill(now) >= 1:
            self._bucket.level -= 1
            return
        self._last = min(max(now + HELD_S, self._last + _BETWEEN_S), now + _LONGEST_HELD_S)
        refusal.held_s = self._last - now


class KeyMeter:
    """Counts what a key takes, and says when it has had enough."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompt_refusals = PromptRefusals(clock)
        self.usage = KeyUsage()
        self._others = KeyUsage()
        now = clock()
        self._limits = limits
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)
        self._feedback = _bucket(limits.feedback_per_minute, now)

    def admit(self, *, brings_feedback: bool = False) -> None:
        """Count a request. Raises RequestRefused for one beyond a limit.

        Feedback that is sure to be refused is refused here, before its body costs others anything.
        """
        try:
            self._admit(brings_feedback=brings_feedback)
        except RequestRefused as refusal:
            self._prompt_refusals.take(refusal)
            raise

    def _admit(self, *, brings_feedback: bool) -> None:
        usage, limits, now = self.usage, self._limits, self._clock()
        if limits.max_concurrent is not None and usage.concurrent + self._others.concurrent >= limits.max_concurrent:
            raise _too_much(f"{limits.max_concurrent} requests of this key are being answered", "concurrency", _RETRY_S)
        requests, tokens = self._requests, self._tokens
        if requests is not None and requests.fill(now) < 1:
            raise _too_much(_sentence("requests", requests), "requests", requests.wait_s(1))
        if tokens is not None and tokens.fill(now) <= 0:
            raise _too_much(_sentence("tokens", tokens), "tokens", tokens.wait_s(1))
        if brings_feedback and (feedback := self._feedback) is not None and feedback.fill(now) < 1:
            raise _too_much(_sentence("events of feedback", feedback), "feedback", feedback.wait_s(1))
        usage.requests += 1
        if requests is not None:
            requests.level -= 1

    def begin_request(self) -> None:
        """One more of its requests is being answered."""
        self.usage.concurrent += 1

    def end_request(self) -> None:
        """One of them is answered."""
        self.usage.concurrent -= 1

    def count_bytes(self, count: int) -> None:
        """So many bytes of a body have come."""
        self.usage.bytes += count

    def count_tokens(self, count: int) -> None:
        """So many tokens were read and sampled."""
        self.usage.tokens += count
        if self._tokens is not None:
            self._tokens.level -= count

    def take_feedback(self, count: int) -> None:
        """So many events are to be stored. Raises RequestRefused where they are more than it may bring now."""
        bucket = self._feedback
        if bucket is not None:
            if bucket.fill(self._clock()) < count:
                wait_s = bucket.wait_s(min(count, bucket.capacity))
                raise _too_much(f"{_sentence('events of feedback', bucket)}, and these are {count}", "feedback", wait_s)
            bucket.level -= count
        self.usage.feedback += count

    def subtract_others(self, others: KeyUsage) -> None:
        """Subtract what other workers have let the key take since the last time."""
        for bucket, name in (
            (self._requests, "requests"),
            (self._tokens, "tokens"),
            (self._feedback, "feedback"),
        ):
            if bucket is not None:  # a worker that ended takes its count with it: nothing is given back for that
                bucket.level -= max(0, getattr(others, name) - getattr(self._others, name))
        self._others = others


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now)


def _sentence(what: str, bucket: Bucket) -> str:
    return f"this key allows {bucket.capacity:.0f} {what} a minute"


def _too_much(message: str, what: str, wait_s: float) -> RequestRefused:
    return RequestRefused(
        f"{message}: try again later", status=429, code=f"key_limit_{what}", retry_after_s=max(wait_s, 0.05)
    )
