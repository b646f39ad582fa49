"""The hot path: answers requests for replies, by an engine, to the client and to the outbox."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import orjson
import structlog

from tuneloop.explorer.dialects.dialect import Dialect, SystemTurns
from tuneloop.explorer.edge import ClientRequest, Headers
from tuneloop.explorer.engines.client import EngineReply
from tuneloop.explorer.engines.fleet import Engine, Fleet
from tuneloop.explorer.http import errors
from tuneloop.explorer.limits import PIECE_BYTES, Admission
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.proxy.grammars import Grammars
from tuneloop.explorer.proxy.request import Request, RequestParser
from tuneloop.explorer.recorder import Recorder
from tuneloop.explorer.traces import Traces
from tuneloop.explorer.transcript import ReplyIdSigner, Sampling, Transcript
from tuneloop.shared import engine_flags
from tuneloop.shared.errors import EngineError, EngineUnreachable, RequestRefused, StorageFull
from tuneloop.shared.experience import Exchange
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: From this status on the fault may be the engine's: one other engine is asked. Not more: the request may be the cause.
_ENGINE_FAULT = 500

#: A request that is refused is refused at once: no longer is waited for the same refusal of a plain request.
_PLAIN_TIMEOUT_S = 2.0

#: What translating a reply raises where an engine's JSON is not a reply.
_UNREADABLE_REPLY = (AttributeError, LookupError, TypeError, ValueError)

#: More than a template opens reasoning with.
_OPENING_TOKENS = 16

#: Keys and versions that are remembered for having failed.
_MAX_ANNOUNCED = 10_000

_JSON: Headers = [(b"content-type", b"application/json")]
#: Proxies and browsers pass each event on at once: nginx would gather 16 KiB.
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class RequestOutcome:
    status = 500
    version: int | None = None
    asked: int


class ReplyInFlight:
    def __init__(self, request: Request, engine: Engine, explorer: str) -> None:
        self.explorer = explorer
        self.request = request
        self.version = engine.version
        self.recorded = False
        self.engine = engine
        self._loads = engine.loads

    def headers(self, kind: Headers) -> Headers:
        attested = [(b"x-tuneloop-attested", self.engine.proof.encode())] if self.engine.proof else []
        return [*self.request.headers(self.version, kind), *attested]

    def exchange(self, sampling: Sampling) -> Exchange:
        request, mixed = self.request, self.engine.loads != self._loads
        return Exchange(
            msg_id=request.msg_id,
            tenant=request.caller.tenant,
            key=request.caller.name,
            endpoint=request.dialect.path,
            request=request.body,
            received_at=request.received_at,
            stamp=request.stamp,
            latency_s=time.monotonic() - request.started,
            experiences=request.writer.transcript.experiences(
                sampling,
                versions=(self.version, self.engine.version if mixed else self.version),
                mixed=mixed,
            ),
            task_id=request.labels.task_id,
            run_id=request.labels.run_id,
            user=request.labels.user,
            priority=request.labels.priority,
            engine=self.engine.number,
            explorer=self.explorer,
            traces=request.traces,
            is_retry=request.is_retry,
            policy=0 if request.route.policy is None else request.route.policy.id,
        )


class RequestFailures:
    """Whose fault a failure is: the version's, where another engine answers; else the request's, or it is unknown."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._announced: set[tuple[int, str]] = set()

    def alone(self, version: int, identity: str) -> None:
        """A request failed, and no other engine has answered it or failed at it."""
        known = bool(identity) and (version, identity) in self._announced
        if len(self._announced) >= _MAX_ANNOUNCED:
            self._announced.clear()
        self._announced.add((version, identity))
        self._metrics.count_reply(version, "unclear" if known else "failed")

    def last(self, version: int, identity: str, *, at_fault: bool) -> None:
        if at_fault:
            self.alone(version, identity)
        else:
            self._metrics.count_reply(version, "refused")

    def at_end(self, in_flight: ReplyInFlight) -> None:
        request, version = in_flight.request, in_flight.version
        if request.writer.transcript.broken:
            self.alone(version, request.caller.identity)
        else:
            self._metrics.count_reply(version, "whole")

    def elsewhere(self, version: int, *, answered: bool) -> None:
        """A request failed, and then another engine answered it, or refused it or failed at it too."""
        self._metrics.count_reply(version, "failed" if answered else "refused")


class Proxy:
    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        *,
        signer: ReplyIdSigner,
        recorder: Recorder,
        metrics: Metrics,
        find_context_length: Callable[[], Awaitable[int | None]],
        traces: Traces | None = None,
    ) -> None:
        self._traces, self._name = traces, settings.explorer_name
        explorer = settings.explorer
        self._fleet, self._recorder, self._timeout_s = fleet, recorder, explorer.request_timeout
        self.system_turns = SystemTurns(fleet)
        self.parser = RequestParser(settings, signer, self.system_turns, find_context_length, fleet)
        self._metrics, self._failures = metrics, RequestFailures(metrics)
        self._grammars = Grammars(settings)
        self.admission = Admission(
            limit=explorer.max_in_flight, max_waiting=explorer.max_waiting, wait_timeout_s=explorer.wait_timeout
        )

    async def answer(self, dialect: Dialect, raw: ClientRequest) -> None:
        started, outcome, request, error = time.monotonic(), RequestOutcome(), None, ""
        try:
            request = await self.parser.parse(dialect, raw, started)
            if self._traces is not None:
                request = request._replace(trace=self._traces.begin(raw.header(b"traceparent")))
            if request.stream:
                raw.keep_alive(request.headers(None, _EVENTS), request.writer.keep_alive)
            if request.store:
                self._recorder.admit()
                self._metrics.captured.labels(request.captured_by).inc()
            else:
                self._metrics.not_stored.labels(request.not_stored).inc()
            await self.admission.acquire(request.caller.identity)
            try:
                whole = await self._answer_in_time(request, raw, outcome)
            finally:
                self.admission.release(request.caller.identity)
            if whole is not None and raw.started:  # to keep the connection alive: the engine's error has no status
                error = orjson.loads(whole[1])["error"]
                code = str(error.get("code") or error.get("type") or "engine_error")
                await raw.end_stream(request.writer.error_event(error["message"], code))
            elif whole is not None:  # its client may read it slowly: it has no engine's place meanwhile
                await raw.respond(outcome.status, *whole)
        except asyncio.CancelledError:
            outcome.status, error = 499, "the client left"
            raise
        except Exception as failure:
            refusal = errors.refusal_of(failure)
            outcome.status, error = refusal.status, refusal.code or type(failure).__name__
            if request is None or not raw.started or refusal.code == "internal":
                raise
            await raw.end_stream(request.writer.error_event(str(refusal), error))
        finally:
            if self._traces is not None and request is not None and request.trace is not None:
                self._traces.send_request(
                    request, request.trace, status=outcome.status, version=outcome.version, error=error
                )
            self._metrics.count_request(dialect.path, outcome.status, outcome.version, time.monotonic() - started)

    async def _answer_in_time(
        self, request: Request, raw: ClientRequest, outcome: RequestOutcome
    ) -> tuple[Headers, bytes] | None:
        """The headers and the body of a whole response; None where it was streamed."""
        # Outside the timeout: it has one of its own, and no engine has the request yet.
        engine = await self._fleet.acquire(request.routing_key, request.prefix_hashes)
        try:
            async with asyncio.timeout(self._timeout_s):
                with request.meter.while_asking(request.writer.transcript):
                    return await self._answer_from(engine, request, raw, outcome)
        except TimeoutError:
            if not (raw.client_is_slow or request.writer.done):
                self._failures.alone(outcome.asked, request.caller.identity)
            if not raw.started:
                raise RequestRefused("the engine did not answer in time", status=504, code="engine_timeout") from None
            if not raw.client_is_slow:  # else the client would not read an error either, and is broken off
                await raw.end_stream(request.writer.error_event("the engine did not answer in time", "engine_timeout"))
            return None

    async def _answer_from(
        self, engine: Engine, request: Request, raw: ClientRequest, outcome: RequestOutcome
    ) -> tuple[Headers, bytes] | None:
        asked_at = 0 if request.trace is None else time.time_ns()
        in_flight, reply = await self._engine_reply(engine, request, outcome)
        outcome.version = in_flight.version
        try:
            if reply.status != 200:
                if reply.status in {401, 403}:  # not the client's concern
                    what = "it does not accept explorer.rollout_model.engine_key"
                    raise EngineError(f"the engine answered {reply.status}: {what}")
                if not 400 <= reply.status < 600:
                    raise EngineError(f"the engine answered {reply.status}, which is neither a reply nor an error")
                outcome.status = reply.status
                at_fault = reply.status >= _ENGINE_FAULT and in_flight.engine is engine  # else another failed too
                self._failures.last(in_flight.version, request.caller.identity, at_fault=at_fault)
                return in_flight.headers(_JSON), await _error_body(in_flight, reply)
            if request.stream:
                outcome.status = 200
                await self._stream_reply(in_flight, raw, reply)
                return None
            body = _convert(request.writer.convert_whole, await reply.read())
            if len(body) > PIECE_BYTES:
                request.meter.hold(len(body))  # until its client has read it
            self._failures.at_end(in_flight)
            await self._record(in_flight)
            outcome.status = 200
            return in_flight.headers(_JSON), body
        except EngineError:
            self._failures.alone(in_flight.version, request.caller.identity)
            raise
        finally:
            reply.close()
            if self._traces is not None and request.trace is not None:
                number, version = in_flight.engine.number, in_flight.version
                self._traces.send_engine(request, request.trace, started=asked_at, engine=number, version=version)
            self._fleet.release(in_flight.engine)

    async def _engine_reply(
        self, engine: Engine, request: Request, outcome: RequestOutcome
    ) -> tuple[ReplyInFlight, EngineReply]:
        """The reply and its engine: another one than `engine` if that fails before it has answered."""
        # Before the request is sent: a whole reply starts to arrive when it has been sampled.
        in_flight = ReplyInFlight(request, engine, self._name)
        outcome.asked = in_flight.version
        try:
            reply_or_engine = await _first_reply(self._fleet, engine, request)
        except BaseException as error:
            self._release_failed(in_flight, error)
            raise
        if isinstance(reply_or_engine, EngineReply):
            return in_flight, reply_or_engine
        log.warning("asking_another_engine", engine=engine.number, other=reply_or_engine.number, msg_id=request.msg_id)
        self._fleet.release(engine)
        failed, in_flight = in_flight.version, ReplyInFlight(request, reply_or_engine, self._name)
        outcome.asked = in_flight.version
        try:
            reply = await _ask(reply_or_engine, request)
        except BaseException as error:
            self._failures.alone(failed, request.caller.identity)
            self._release_failed(in_flight, error)
            raise
        self._failures.elsewhere(failed, answered=reply.status == 200)
        return in_flight, reply

    def _release_failed(self, in_flight: ReplyInFlight, error: BaseException) -> None:
        """Release an engine that has not answered; unless the request was cancelled, its version has failed."""
        self._fleet.release(in_flight.engine)
        if not isinstance(error, asyncio.CancelledError):
            self._failures.alone(in_flight.version, in_flight.request.caller.identity)

    async def _stream_reply(self, in_flight: ReplyInFlight, raw: ClientRequest, reply: EngineReply) -> None:
        """Send the chunks as they arrive. All is on disk before the last one, whatever ends the stream."""
        request, writer = in_flight.request, in_flight.request.writer

        def forward(block: bytes) -> bool:
            data = _convert(writer.convert_block, block)
            return raw.write(data) if data else True

        if not raw.started:
            await raw.start(200, in_flight.headers(_EVENTS))
        try:
            while not await reply.pipe(forward):
                await raw.drain()
            if not writer.done:
                raise EngineError("the stream ended without [DONE]")
            self._failures.at_end(in_flight)
            await self._record(in_flight)
            await raw.end_stream(writer.finish())
        except StorageFull as error:
            log.error("reply_lost", msg_id=request.msg_id, reason=str(error))
            await raw.end_stream(writer.error_event("the reply could not be stored", "storage_full"))
        except EngineError as error:
            log.warning("stream_broken", msg_id=request.msg_id, reason=str(error))
            self._failures.alone(in_flight.version, request.caller.identity)
            await self._record_partial(in_flight)
            await raw.end_stream(writer.error_event("the engine broke off its reply", "engine_error"))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                log.info("client_left" if raw.client_left else "stream_cancelled", msg_id=request.msg_id)
            await self._record_partial(in_flight)
            raise

    async def _record_partial(self, in_flight: ReplyInFlight) -> None:
        if in_flight.recorded:
            return
        transcript = in_flight.request.writer.transcript
        # A client may disconnect as soon as it has the end of every choice.
        transcript.broken = not (transcript.complete and len(transcript.choices) == in_flight.request.choices)
        try:
            await self._record(in_flight)
        except StorageFull as error:
            log.error("reply_lost", msg_id=in_flight.request.msg_id, reason=str(error))

    async def _record(self, in_flight: ReplyInFlight) -> None:
        """Write the exchange to disk, unless the client wants it not stored; even if this is cancelled meanwhile."""
        request = in_flight.request
        request.meter.count_tokens(request.writer.transcript)
        if not (request.store and request.writer.transcript.choices):
            return
        sampling, began_at = request.sampling, 0 if request.trace is None else time.time_ns()
        try:
            sampling = _within_budget(sampling, request.writer.transcript)
            if sampling.by_grammar:
                sampling = await self._grammars.resolve(in_flight.engine, request)
        finally:
            in_flight.recorded = True
            await self._recorder.record(in_flight.exchange(sampling))
        if self._traces is not None and request.trace is not None:
            self._traces.send_record(request, request.trace, started=began_at, version=in_flight.version)


def _within_budget(sampling: Sampling, transcript: Transcript) -> Sampling:
    """How a reply was sampled: it is marked if its reasoning may have reached the budget, where the engine ends it."""
    if sampling.budget is None:
        return sampling
    longest = max(len(each.completion_ids) for each in transcript.choices.values())
    counted = min(longest, transcript.reasoning_tokens or longest)  # parsers that cannot count say 0
    if counted + _OPENING_TOKENS < sampling.budget:
        return sampling
    return sampling._replace(unsampled="sampling:thinking_token_budget", by_grammar=False, truncated=False)


async def _ask(engine: Engine, request: Request) -> EngineReply:
    path, headers = request.dialect.upstream_path, request.engine_headers()
    return await engine.http.request("POST", path, request.upstream_body, headers)


async def _first_reply(fleet: Fleet, engine: Engine, request: Request) -> EngineReply | Engine:
    try:
        reply = await _ask(engine, request)
    except EngineUnreachable:
        other = await fleet.wait_for_another(engine, request.routing_key, request.prefix_hashes)
        if other is None:
            raise
        return other
    if (
        reply.status < _ENGINE_FAULT
        or (other := fleet.acquire_another(engine, request.routing_key, request.prefix_hashes)) is None
    ):
        return reply
    reply.close()
    return other


def _convert(convert: Callable[[bytes], bytes], content: bytes) -> bytes:
    try:
        return convert(content)
    except _UNREADABLE_REPLY as error:
        raise EngineError(f"the engine's reply cannot be read: {error!r}") from error


async def _error_body(in_flight: ReplyInFlight, reply: EngineReply) -> bytes:
    request, body = in_flight.request, await reply.read()
    if reply.status < _ENGINE_FAULT and any(name.encode() in body for name in request.added_fields):
        body = await _error_of_plain_request(in_flight.engine, request, reply.status) or body
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("error"), dict):
        error = {"message": f"the engine answered {reply.status}", "type": "server_error", "param": None, "code": None}
        parsed = {"error": error}
    elif isinstance(parsed["error"].get("message"), str):
        # Who can change it writes settings, not the command line of an engine.
        parsed["error"] = errors.tell_too_long(parsed["error"])
        parsed["error"]["message"] = engine_flags.name_settings(parsed["error"]["message"])
    return orjson.dumps(request.writer.convert_error(parsed, reply.status))


async def _error_of_plain_request(engine: Engine, request: Request, status: int) -> bytes | None:
    """The error for the request without our fields, which some versions of vLLM quote; None if there is none soon."""
    with contextlib.suppress(EngineError, TimeoutError):
        async with asyncio.timeout(_PLAIN_TIMEOUT_S):
            reply = await engine.http.request(
                "POST", request.dialect.upstream_path, request.plain_body(), request.engine_headers()
            )
            try:
                return await reply.read() if reply.status == status else None
            finally:
                reply.close()
    return None
