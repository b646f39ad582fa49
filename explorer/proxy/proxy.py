"""Answers requests for replies: the client's request to an engine, the engine's reply to the client and to disk alike.

This is the road that must cost next to nothing. What a request asks for is understood by `explorer/proxy/request.py`,
what is said in another way by `explorer/dialects/dialect.py`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import orjson
import structlog

from tuneloop.explorer.capture.recorder import Recorder
from tuneloop.explorer.capture.reply_id import ReplyIdSigner
from tuneloop.explorer.dialects.dialect import Dialect, ReplyWriter, events
from tuneloop.explorer.engines.admission import Admission
from tuneloop.explorer.engines.client import EngineReply
from tuneloop.explorer.engines.fleet import Engine, Fleet
from tuneloop.explorer.http import errors
from tuneloop.explorer.http.server import RawRequest
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.proxy.background_responses import BackgroundResponses
from tuneloop.explorer.proxy.in_flight import ReplyInFlight
from tuneloop.explorer.proxy.request import Request, RequestParser
from tuneloop.shared.errors import EngineError, EngineUnreachable, RequestRefused, SpoolFull
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: An engine that answers so may be ill: another one is asked, once. Not more often: the request may be what it died of.
_ILL = 500

#: A request that is refused is refused at once.
_REFUSED_S = 2.0

#: What telling a reply in other words comes upon where an engine says JSON that is no reply.
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)

_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


class Proxy:
    """The routes that sample."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        *,
        signer: ReplyIdSigner,
        recorder: Recorder,
        metrics: Metrics,
        copied: Callable[[Request], None] = lambda call: None,
    ) -> None:
        """`copied` may send copies of a request elsewhere."""
        explorer = settings.explorer
        self._fleet = fleet
        self._calls = RequestParser(settings, signer)
        self._recorder = recorder
        self._metrics = metrics
        self._copied = copied
        self._timeout_s = explorer.request_timeout
        self.places = Admission(
            places=explorer.max_in_flight, waiting=explorer.max_waiting, patience_s=explorer.wait_timeout
        )
        self.background = BackgroundResponses(keep=self._keep, leave=self._leave, timeout_s=explorer.request_timeout)

    async def answer(self, dialect: Dialect, visit: RawRequest) -> None:
        """Answer a request in one dialect, whole or streamed."""
        started = time.monotonic()
        told = RequestOutcome()
        try:
            call = await self._calls.understood(dialect, visit, started)
            if call.stored:
                self._recorder.admit()
            await self.places.take()
            try:
                await self._in_time(call, visit, told)
            finally:
                if not told.goes_on:
                    self.places.give_back()
        except asyncio.CancelledError:
            told.status = 499
            raise
        except Exception as error:
            told.status = errors.refusal_of(error).status
            raise
        finally:
            self._metrics.answered(dialect.path, told.status, told.version, time.monotonic() - started)

    async def _in_time(self, call: Request, visit: RawRequest, told: "RequestOutcome") -> None:
        engine = await self._fleet.take(call.wanted, call.beginnings)  # with its own patience: nobody was asked yet
        version = engine.version
        self._copied(call)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask(engine, call, visit, told)
        except TimeoutError:
            if not visit.slow:
                self._metrics.replied(version, "failed")
            if not visit.started:
                raise RequestRefused("the engine did not answer in time", status=504, code="engine_timeout") from None
            if visit.slow:  # nobody would read what is said of it
                visit.break_off()
            else:
                visit.end(call.teller.broken("the engine did not answer in time", "engine_timeout"))

    async def _ask(self, engine: Engine, call: Request, visit: RawRequest, told: "RequestOutcome") -> None:
        spoken, reply = await self._reply(engine, call)
        told.version = spoken.version
        try:
            if reply.status != 200:
                _check_refusal(reply.status)
                told.status = reply.status
                self._metrics.replied(spoken.version, "refused" if reply.status < _ILL else "failed")
                visit.answer(reply.status, call.headers(spoken.version, _JSON), await _refusal(spoken, reply))
            elif call.stream:
                told.status = 200
                await self._stream(spoken, visit, reply)
            else:
                body = _whole(call.teller, await reply.read())
                self._metrics.replied(spoken.version, "whole")
                await self._keep(spoken)
                told.status = 200
                visit.answer(200, call.headers(spoken.version, _JSON), body)
        except EngineError:
            self._metrics.replied(spoken.version, "failed")
            raise
        finally:
            reply.close()
            if told.status == 200 and call.teller.unfinished:
                told.goes_on = True
                self.background.follow(spoken)
            else:
                self._fleet.give_back(spoken.engine)

    async def _reply(self, engine: Engine, call: Request) -> tuple["ReplyInFlight", EngineReply]:
        """The engine that answers, and its reply; of another one if this one is ill and has said nothing yet."""
        headers = _headers(call)
        spoken = ReplyInFlight(
            call, engine
        )  # before it is asked: a whole reply begins to arrive when it has been sampled
        try:
            told = await self._told_by(engine, call, headers)
        except BaseException as error:
            self._failed(spoken, error)
            raise
        if isinstance(told, EngineReply):
            return spoken, told
        log.warning("asking_another_engine", engine=engine.number, other=told.number, msg_id=call.msg_id)
        self._failed(spoken)
        spoken = ReplyInFlight(call, told)
        try:
            return spoken, await told.http.ask("POST", call.dialect.upstream_path, call.upstream, headers)
        except BaseException as error:
            self._failed(spoken, error)
            raise

    def _failed(self, spoken: "ReplyInFlight", error: BaseException | None = None) -> None:
        """Give back an engine that has not answered; where nobody stopped it, that is the fault of its version."""
        self._fleet.give_back(spoken.engine)
        if not isinstance(error, asyncio.CancelledError):
            self._metrics.replied(spoken.version, "failed")

    async def _told_by(self, engine: Engine, call: Request, headers: Mapping[str, str]) -> EngineReply | Engine:
        """An engine's reply, or which one is asked instead of it."""
        try:
            reply = await engine.http.ask("POST", call.dialect.upstream_path, call.upstream, headers)
        except EngineUnreachable:
            other = await self._fleet.wait_for_another(engine, call.wanted, call.beginnings)
            if other is None:
                raise
            return other
        if reply.status < _ILL or (other := self._fleet.take_another(engine, call.wanted, call.beginnings)) is None:
            return reply
        reply.close()
        return other

    async def _stream(self, spoken: "ReplyInFlight", visit: RawRequest, reply: EngineReply) -> None:
        """Send the pieces as the engine says them. All is on disk before the last one, whatever ends it."""
        call, teller, rest = spoken.call, spoken.call.teller, bytearray()

        def tell(block: bytes) -> bool:
            if said := _said(teller, rest, block):
                visit.write(said)
            return not visit.slow

        visit.start(200, call.headers(spoken.version, _EVENTS))
        try:
            while not await reply.pour(tell):
                await visit.drain()
            if not teller.done:
                raise EngineError("it ended without [DONE]")
            self._metrics.replied(spoken.version, "whole")
            await self._keep(spoken)
            visit.end(teller.last())
        except SpoolFull as error:
            log.error("reply_lost", msg_id=call.msg_id, reason=str(error))
            visit.end(teller.broken("the reply could not be stored", "storage_full"))
        except EngineError as error:
            log.warning("stream_broken", msg_id=call.msg_id, reason=str(error))
            self._metrics.replied(spoken.version, "failed")
            await self._keep_the_rest(spoken)
            visit.end(teller.broken("the engine broke off its reply", "engine_error"))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                log.info("client_left" if visit.gone else "stream_cancelled", msg_id=call.msg_id)
            await self._keep_the_rest(spoken)
            raise

    async def _keep_the_rest(self, spoken: "ReplyInFlight") -> None:
        """Keep what was said before the client left or the engine broke off; nobody waits for it any more."""
        if spoken.kept:
            return
        transcript = spoken.call.teller.transcript
        # A client may leave as soon as it has heard the end of every choice.
        transcript.broken = not (transcript.complete and len(transcript.choices) == spoken.call.choices)
        try:
            await self._keep(spoken)
        except SpoolFull as error:
            log.error("reply_lost", msg_id=spoken.call.msg_id, reason=str(error))

    def _leave(self, spoken: "ReplyInFlight") -> None:
        self._fleet.give_back(spoken.engine)
        self.places.give_back()

    async def _keep(self, spoken: "ReplyInFlight") -> None:
        """Bring the exchange to disk, unless the client asked that it be forgotten."""
        spoken.kept = True
        if spoken.call.stored and spoken.call.teller.transcript.choices:
            await self._recorder.record(spoken.exchange())


def _headers(call: Request) -> Mapping[str, str]:
    # vLLM makes its reply's id from this header; the client's own would let it name other people's replies.
    name = call.msg_id.removeprefix(call.dialect.prefix)
    return {"X-Request-Id": name, "Content-Type": "application/json"}


def _whole(teller: ReplyWriter, reply: bytes) -> bytes:
    try:
        return teller.whole(reply)
    except _UNREADABLE as error:
        raise EngineError(f"the engine's reply cannot be read: {error!r}") from error


def _said(teller: ReplyWriter, rest: bytearray, block: bytes) -> bytes:
    """What the client gets of a block of a stream."""
    try:
        return b"".join([teller.event(event) for event in events(rest, block)])
    except _UNREADABLE as error:
        raise EngineError(f"the engine's reply cannot be read: {error!r}") from error


def _check_refusal(status: int) -> None:
    """Raise EngineError for what is no answer to the client."""
    if status in {401, 403}:
        raise EngineError(f"the engine answered {status}: it does not take explorer.rollout_model.engine_key")
    if not 400 <= status < 600:
        raise EngineError(f"the engine answered {status}, which is neither a reply nor a refusal")


async def _refusal(spoken: ReplyInFlight, reply: EngineReply) -> bytes:
    """What the engine says of a request that it does not take, in the client's envelope."""
    call, said = spoken.call, await reply.read()
    if reply.status < _ILL and any(name.encode() in said for name in call.added):
        said = await _refusal_of_plain(spoken.engine, call, reply.status) or said
    try:
        told = orjson.loads(said)
    except orjson.JSONDecodeError:
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("error"), dict):
        error = {"message": f"the engine answered {reply.status}", "type": "server_error", "param": None, "code": None}
        told = {"error": error}
    return orjson.dumps(call.teller.refused(told, reply.status))


async def _refusal_of_plain(engine: Engine, call: Request, status: int) -> bytes | None:
    """What the engine says of the request without what we added; None if it takes that, or does not say so soon.

    Some versions of vLLM quote in a refusal what they were asked, and the client would read there what it never said.
    """
    with contextlib.suppress(EngineError, TimeoutError):
        async with asyncio.timeout(_REFUSED_S):
            reply = await engine.http.ask("POST", call.dialect.upstream_path, call.plain(), _headers(call))
            try:
                return await reply.read() if reply.status == status else None
            finally:
                reply.close()
    return None


class RequestOutcome:
    """What a request came to, for the metrics."""

    status = 500
    version: int | None = None
    goes_on = False
