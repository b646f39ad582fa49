"""Spans as plain values. A reply's and a version's ids are made from their names: who knows those can link."""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

AttributeValue = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, AttributeValue]

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


class SpanId(NamedTuple):
    """Where a span is: 128 bits of its trace, 64 of its own."""

    trace: int
    span: int

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace:032x}-{self.span:016x}-01"


class RequestTrace(NamedTuple):
    """The spans of a request: its own, within the client's `parent`, and the engine's part of it."""

    parent: SpanId | None
    request: SpanId
    engine: SpanId


class RemoteParent(NamedTuple):
    """The span of a client within which it sent a request; not `sampled`: it wants no spans of it."""

    id: SpanId
    sampled: bool


class FinishedSpan(NamedTuple):
    """Work that is done. Times are nanoseconds since 1970."""

    name: str
    id: SpanId
    started_ns: int
    ended_ns: int
    attributes: Attributes
    kind: Literal["server", "client", "internal"] = "internal"
    parent: SpanId | None = None
    links: Sequence[SpanId] = ()
    events: Sequence[tuple[str, Attributes]] = ()
    error: str = ""


def parse_traceparent(header: str | None) -> RemoteParent | None:
    """The client's span, None where the header is missing or not as W3C has it.

    >>> parse_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").sampled
    True
    """
    found = _TRACEPARENT.fullmatch(header.strip()) if header else None
    if found is None:
        return None
    parent = SpanId(int(found[1], 16), int(found[2], 16))
    return RemoteParent(parent, bool(int(found[3], 16) & 1)) if all(parent) else None


def new_span(within: SpanId | None = None) -> SpanId:
    """A span within another, or the first of a trace of its own."""
    return SpanId(within.trace if within else secrets.randbits(127) + 1, secrets.randbits(63) + 1)


def span_of_reply(msg_id: str) -> SpanId:
    """The span in which a reply was recorded."""
    return _place_of("reply", msg_id)


def span_of_version(experiment: str, version: int) -> SpanId:
    """The span in which a version was published; `experiment` is project and name."""
    return _place_of("version", f"{experiment}:{version}")


def _place_of(kind: str, name: str) -> SpanId:
    digest = hashlib.sha256(f"tuneloop:{kind}:{name}".encode()).digest()
    return SpanId(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]))
