"""How the control process and a worker talk, over one Unix socket: frames of a length and a msgpack array."""

import asyncio
import itertools
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec
import structlog

from tuneloop.explorer.engines.fleet import EngineView, TrafficSplit
from tuneloop.explorer.engines.model_routes import PolicyView
from tuneloop.explorer.limits import KeyUsage
from tuneloop.explorer.metrics import MetricSample
from tuneloop.explorer.tokens import FeedbackClaims
from tuneloop.shared.errors import ChannelLost, RequestRefused
from tuneloop.shared.ledger.facts import ExplorerFacts, Standstill
from tuneloop.shared.ledger.keys import KeyTable
from tuneloop.shared.ledger.recording.feedback import FeedbackResults
from tuneloop.shared.operations.diagnosis import find_stops
from tuneloop.shared.outbox_status import OutboxStatus

log = structlog.get_logger()

_LENGTH = struct.Struct("<I")

#: How long the control process may take beyond the time that it was given, for the metrics, and for a token.
_GRACE_S, _EXPOSITION_S, _TOKEN_S = 0.5, 5.0, 2.0


class ChannelMessage(msgspec.Struct, frozen=True, tag=True):
    """Something that one side asks of the other."""


class GetStartInfo(ChannelMessage, frozen=True):
    """A worker: here I am. The answer is a Beginning."""


class FleetView(msgspec.Struct, frozen=True):
    engines: list[EngineView]
    split: TrafficSplit | None
    keys: KeyTable
    policies: list[PolicyView] | None


class AnnounceOwner(ChannelMessage, frozen=True):
    """A worker: I write outbox files of this owner. It serves when that is known. The answer is a FleetView."""

    owner: str


class WaitUntilTaken(ChannelMessage, frozen=True):
    """A worker: wait until all that is on disk, of all workers, is in the database. The answer is whether it is."""

    timeout_s: float


class WakeDrain(ChannelMessage, frozen=True):
    """A worker: a request waits for the outcome of feedback. Nothing is answered."""


class UpdateResults(ChannelMessage, frozen=True):
    results: FeedbackResults


class UpdateOutbox(ChannelMessage, frozen=True):
    status: OutboxStatus
    away: bool


class UseFeedbackToken(ChannelMessage, frozen=True):
    """A worker: a browser's token brings so many events. The answer is whether it allows them."""

    claims: FeedbackClaims
    count: int


class GetExposition(ChannelMessage, frozen=True):
    """A worker: what does the whole service's /metrics say?"""


class ReportFailure(ChannelMessage, frozen=True):
    reason: str


class ReportMetrics(ChannelMessage, frozen=True):
    samples: list[MetricSample]


class ShareUsage(ChannelMessage, frozen=True):
    """A worker: my keys have taken so much. The answer is what they have taken of all other workers."""

    usage: dict[str, KeyUsage]


class UpdateEngine(ChannelMessage, frozen=True):
    engine: EngineView


class UpdateSplit(ChannelMessage, frozen=True):
    split: TrafficSplit | None


class UpdatePolicies(ChannelMessage, frozen=True):
    """The control process: these are the policies from now on; None: they are not known yet."""

    policies: list[PolicyView] | None


class LoadVersion(ChannelMessage, frozen=True):
    """A worker: have engines hold that version of a policy. The answer is why that cannot be, empty where it can."""

    policy: int
    version: int


class GetIdleTimes(ChannelMessage, frozen=True):
    """The control process: for how long have you not asked each version of a policy at this engine, in seconds?"""

    number: int


class UpdateKeys(ChannelMessage, frozen=True):
    table: KeyTable


class WaitUntilIdle(ChannelMessage, frozen=True):
    """The control process: wait until you have no request in flight at this engine, or for that version there."""

    number: int
    version: int | None = None


class CollectMetrics(ChannelMessage, frozen=True):
    """The control process: what have you counted? The answer is a list of samples."""


class AnswerAtOnce(ChannelMessage, frozen=True):
    """The control process: does your event loop turn? And these parts stand still. The answer is a WorkerMovement."""

    stops: tuple[Standstill, ...] = ()


class WorkerMovement(msgspec.Struct, frozen=True):
    """In seconds: how long each engine is quiet, a record waits for the disk, and since an engine sent something."""

    quiet: list[float | None]
    append_s: float
    reply_s: float | None
    descriptors: int


class BeginFile(ChannelMessage, frozen=True):
    """The control process: begin a new file. Nothing is answered."""


class StartInfo(msgspec.Struct, frozen=True):
    settings: bytes
    engines: list[EngineView]
    #: The ledger's SQLite file: a worker that starts after it was replaced must not take the other for it.
    database_file: tuple[int, int] | None = None


_Any = (
    GetStartInfo
    | AnnounceOwner
    | WaitUntilTaken
    | WakeDrain
    | UpdateResults
    | UpdateOutbox
    | UseFeedbackToken
    | GetExposition
    | ReportFailure
    | ReportMetrics
    | UpdateEngine
    | UpdateSplit
    | UpdateKeys
    | UpdatePolicies
    | LoadVersion
    | GetIdleTimes
    | ShareUsage
    | WaitUntilIdle
    | CollectMetrics
    | AnswerAtOnce
    | BeginFile
)


class _Frame(msgspec.Struct, array_like=True, frozen=True):
    """A question, or the answer to the one of that number."""

    number: int
    question: _Any | None = None
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    failed: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Frame).decode

AnswerMessage = Callable[[Any], Awaitable[Any]]


class Channel:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answering: AnswerMessage) -> None:
        self._reader = reader
        self._writer = writer
        self._answering = answering
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[_Frame]] = {}
        self.lost = False

    @classmethod
    async def over(cls, end: socket.socket, answering: AnswerMessage) -> "Channel":
        """A channel over one end of a socket pair. `answering` answers the other side's questions."""
        reader, writer = await asyncio.open_connection(sock=end)
        return cls(reader, writer, answering)

    async def ask(self, question: ChannelMessage, kind: Any = None, *, timeout_s: float | None = None) -> Any:
        """The answer, of that type. Raises ChannelLost if none comes."""
        if self.lost:
            raise ChannelLost("the other process is gone")
        number = next(self._numbers)
        answered = self._open[number] = asyncio.get_running_loop().create_future()
        self._send(_Frame(number, cast(_Any, question)))
        try:
            async with asyncio.timeout(timeout_s):
                frame = await answered
        except TimeoutError:
            raise ChannelLost("the other process does not answer") from None
        finally:
            self._open.pop(number, None)
        if frame.failed:
            raise ChannelLost("the other process could not answer")
        return msgspec.msgpack.decode(frame.answer, type=kind)

    def tell(self, message: ChannelMessage) -> None:
        if not self.lost:
            self._send(_Frame(0, cast(_Any, message)))

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                    frame = _decode(await self._reader.readexactly(length))
                    if frame.question is not None:
                        group.create_task(self._answer(frame.number, frame.question))
                    elif (answered := self._open.get(frame.number)) is not None and not answered.done():
                        answered.set_result(frame)
        except* (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        self.lost = True
        for answered in self._open.values():
            if not answered.done():
                answered.set_exception(ChannelLost("the other process is gone"))
        self._writer.close()

    async def _answer(self, number: int, question: _Any) -> None:
        try:
            answer = msgspec.Raw(_encode(await self._answering(question)))
        except Exception:
            log.exception("question_not_answered", question=type(question).__name__)
            answered = _Frame(number, failed=True)
        else:
            answered = _Frame(number, answer=answer)
        if number:
            self._send(answered)

    def _send(self, frame: _Frame) -> None:
        if not self._writer.is_closing():
            data = _encode(frame)
            self._writer.write(_LENGTH.pack(len(data)) + data)


class ControlClient:
    """The control process, as the routes see it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stops: Sequence[Standstill] = ()
        self._updated_at = time.monotonic()

    def note_stops(self, stops: Sequence[Standstill]) -> None:
        self._stops, self._updated_at = stops, time.monotonic()

    def stops(self) -> tuple[Standstill, ...]:
        return (*find_stops(ExplorerFacts(control_s=time.monotonic() - self._updated_at)), *self._stops)

    async def wait_until_taken(self, timeout_s: float) -> bool:
        """Wait until all that is on disk now is in the database. False if it is not by then, or away."""
        try:
            return bool(await self._channel.ask(WaitUntilTaken(timeout_s), bool, timeout_s=timeout_s + _GRACE_S))
        except ChannelLost as error:  # what is on disk is safe there all the same
            log.warning("control_process_silent", reason=str(error))
            return False

    def wake_drain(self) -> None:
        self._channel.tell(WakeDrain())

    async def take_of_token(self, claims: FeedbackClaims, count: int) -> bool:
        return bool(await self._answer_to(UseFeedbackToken(claims, count), bool, _TOKEN_S))

    async def load_version(self, policy: int, version: int) -> str:
        """Have engines hold a version of a policy; why that cannot be, empty where it can."""
        return str(await self._answer_to(LoadVersion(policy, version), str, None))

    async def exposition(self) -> bytes:
        return bytes(await self._answer_to(GetExposition(), bytes, _EXPOSITION_S))

    async def _answer_to(self, question: ChannelMessage, kind: Any, timeout_s: float | None) -> Any:
        try:
            return await self._channel.ask(question, kind, timeout_s=timeout_s)
        except ChannelLost as error:
            raise RequestRefused(str(error), status=503, code="control_process_silent", retry_after_s=1.0) from None
