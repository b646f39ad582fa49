"""Answers chat completions: the client's request to an engine, the engine's reply to the client and to disk alike."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import orjson
import structlog
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from explorer import vllm_api
from explorer.body import read_object, text_or_number, wrong_type
from explorer.fleet import Engine, Fleet
from explorer.metrics import Metrics
from explorer.msg_id import MAX_CHOICES, PREFIX, Mint
from explorer.recorder import Recorder
from explorer.sampling import Sampling, sampling_of
from explorer.transcript import Transcript
from explorer.upstream import events, reaching_an_engine
from shared.config import Settings
from shared.errors import EngineError, RequestRefused, SpoolFull
from shared.experience import Exchange

log = structlog.get_logger()

PATH = "/v1/chat/completions"
TENANT = "default"

_T = TypeVar("_T")

#: Fields that are for us and mean nothing to an engine.
_OURS = frozenset({"store", "metadata"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, understood: what goes upstream and what is kept of it."""

    body: Mapping[str, Any]
    upstream: Mapping[str, Any]
    msg_id: str
    sampling: Sampling
    ignored: tuple[str, ...]
    task_id: str | None
    run_id: str | None
    request_id: str
    received_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)

    @property
    def stream(self) -> bool:
        """Whether the client wants the reply in pieces."""
        return self.body.get("stream") is True

    def transcript(self) -> Transcript:
        """An empty transcript for the reply."""
        return Transcript(
            msg_id=self.msg_id,
            wants_logprobs=self.body.get("logprobs") is True,
            wants_token_ids=self.body.get("return_token_ids") is True,
        )

    def headers(self, version: int) -> dict[str, str]:
        """What the reply says about itself."""
        headers = {"x-request-id": self.request_id, "x-tuneloop-version": str(version)}
        if self.ignored:
            headers["x-tuneloop-ignored"] = ", ".join(self.ignored)
        return headers


class Chat:
    """The chat route."""

    def __init__(self, settings: Settings, fleet: Fleet, *, mint: Mint, recorder: Recorder, metrics: Metrics) -> None:
        self._fleet = fleet
        self._mint = mint
        self._recorder = recorder
        self._metrics = metrics
        self._default_temperature = settings.model.temperature
        self._default_tokens = settings.model.max_response_tokens
        self._max_body_bytes = settings.explorer.max_body_bytes
        on_cpu = not settings.cluster.gpu_per_node and not settings.explorer.rollout_model.engine_urls
        self._unsafe = vllm_api.BREAKS_CPU_ENGINES if on_cpu else frozenset()
        # Engines of others may have defaults of their own, and then a reply would not be what we take it for.
        defaults = vllm_api.NEUTRAL | {"temperature": settings.model.temperature}
        self._defaults = defaults if settings.explorer.rollout_model.engine_urls else {}

    async def answer(self, request: Request) -> Response:
        """The reply to one request, whole or streamed."""
        call = self._understand(await read_object(request, max_bytes=self._max_body_bytes), request.headers)
        self._recorder.admit()
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(self._fleet.engine())
            spoken = Spoken(call, engine)
            reply = await unless_gone(request.receive, stack.enter_async_context(self._post(engine, call)))
            if reply.status != 200:
                return await self._refused(call, engine, reply)
            if call.stream:
                return Stream(self, spoken, reply, stack.pop_all())
            with reaching_an_engine():
                body = await unless_gone(request.receive, reply.read())
            return await self._whole(spoken, body)

    def _understand(self, body: dict[str, Any], headers: Mapping[str, str]) -> Call:
        for param in ("stream", "logprobs", "return_token_ids", "store"):
            if not isinstance(body.get(param), bool | None):
                raise wrong_type(param, "a boolean")
        metadata = body.get("metadata")
        if not isinstance(metadata, dict | None):
            raise wrong_type("metadata", "an object")
        metadata = metadata or {}
        choices = body.get("n") or 1
        if isinstance(choices, bool) or not isinstance(choices, int) or not 1 <= choices <= MAX_CHOICES:
            raise RequestRefused(f"n must be an integer from 1 to {MAX_CHOICES}", code="out_of_range", param="n")
        sampling = sampling_of(body, default_temperature=self._default_temperature)
        if metadata.get("train") in (False, "false"):
            sampling = sampling._replace(off_policy="opt_out")
        ignored = tuple(param for param in self._unsafe if body.get(param) is not None)
        forwarded = {key: value for key, value in body.items() if key not in _OURS and key not in ignored}
        # Not vLLM's own default, max_new_tokens: that one also caps what clients ask for.
        if self._default_tokens is not None and not (body.get("max_tokens") or body.get("max_completion_tokens")):
            forwarded["max_completion_tokens"] = self._default_tokens
        msg_id = self._mint.mint(TENANT, choices)
        return Call(
            body=body,
            upstream=self._defaults | forwarded | vllm_api.CAPTURE,
            msg_id=msg_id,
            sampling=sampling,
            ignored=ignored,
            task_id=text_or_number(metadata, "task_id"),
            run_id=text_or_number(metadata, "run_id"),
            request_id=headers.get("x-request-id", msg_id),
        )

    def _post(self, engine: Engine, call: Call) -> "_Posted":
        # vLLM makes its reply's id from this header; the client's own would let it name other people's replies.
        headers = {"X-Request-Id": call.msg_id.removeprefix(PREFIX), "Content-Type": "application/json"}
        return _Posted(engine.session, orjson.dumps(call.upstream), headers)

    async def _refused(self, call: Call, engine: Engine, reply: aiohttp.ClientResponse) -> Response:
        """Pass on what the engine says of a request that it does not take."""
        with reaching_an_engine():
            body = await reply.read()
        self.count(call, engine.version, reply.status)
        try:
            told = orjson.loads(body)
        except orjson.JSONDecodeError:
            told = None
        if not isinstance(told, dict) or not isinstance(told.get("error"), dict):
            message = f"the engine answered {reply.status}"
            body = orjson.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": None}})
        return Response(body, reply.status, call.headers(engine.version), "application/json")

    async def _whole(self, spoken: "Spoken", body: bytes) -> Response:
        told = spoken.hear(body)
        await self.keep(spoken)
        self.count(spoken.call, spoken.version, 200)
        return Response(orjson.dumps(told), 200, spoken.call.headers(spoken.version), "application/json")

    async def keep(self, spoken: "Spoken") -> None:
        """Bring the exchange to disk, unless the client asked that it be forgotten."""
        exchange = spoken.exchange()
        if spoken.call.body.get("store") is not False and exchange.experiences:
            await self._recorder.record(exchange)

    def count(self, call: Call, version: int, status: int) -> None:
        """Count a request that has been answered."""
        self._metrics.requests.labels(PATH, status, version).inc()
        self._metrics.request_seconds.labels(PATH).observe(time.monotonic() - call.started)


class Spoken:
    """A reply being spoken by an engine: its transcript, and which weights may have written it."""

    def __init__(self, call: Call, engine: Engine) -> None:
        self.call = call
        self.transcript = call.transcript()
        self.version = engine.version
        self._engine = engine
        self._loads = engine.loads

    def hear(self, piece: bytes) -> Mapping[str, Any] | None:
        """Take down one piece of JSON; what the client gets of it. Raises EngineError if it cannot be read."""
        try:
            told: dict[str, Any] = orjson.loads(piece)
            if not isinstance(told, dict):
                raise TypeError(f"{type(told).__name__} instead of an object")
            return self.transcript.hear(told)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"the engine's reply cannot be read: {error!r}") from error

    def exchange(self) -> Exchange:
        """What is kept of the request and of what was heard until now."""
        call = self.call
        return Exchange(
            msg_id=call.msg_id,
            tenant=TENANT,
            endpoint=PATH,
            request=orjson.dumps(call.body),
            received_at=call.received_at,
            latency_s=time.monotonic() - call.started,
            experiences=self.transcript.experiences(
                call.sampling,
                versions=(self.version, self._engine.version),
                mixed=self._engine.loads != self._loads,
            ),
            task_id=call.task_id,
            run_id=call.run_id,
        )


class Stream(Response):
    """A reply in pieces. It is on disk before its last piece, and kept as cut off when the client leaves early."""

    def __init__(self, chat: Chat, spoken: Spoken, reply: aiohttp.ClientResponse, stack: AsyncExitStack) -> None:
        super().__init__(None, 200, spoken.call.headers(spoken.version), "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self._chat = chat
        self._spoken = spoken
        self._reply = reply
        self._stack = stack
        self._kept = False

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces as the engine says them, until it ends or the client leaves."""
        async with self._stack:
            try:
                await unless_gone(receive, self._send_all(send))
            except RequestRefused:
                log.info("client_left", msg_id=self._spoken.call.msg_id)
            finally:
                self._chat.count(self._spoken.call, self._spoken.version, 200)
                await self._keep_the_rest()

    async def _keep_the_rest(self) -> None:
        """Keep what was said before the client left or the engine broke off; nobody waits for it any more."""
        try:
            await self._keep()
        except SpoolFull as error:
            log.error("reply_lost", msg_id=self._spoken.call.msg_id, reason=str(error))

    async def _keep(self) -> None:
        if not self._kept:
            self._kept = True
            await self._chat.keep(self._spoken)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for piece in self._pieces():
            await send(_part(b"data: " + piece + b"\n\n", more=True))
        await send(_part(b"", more=False))

    async def _pieces(self) -> AsyncIterator[bytes]:
        done = False
        try:
            async for event in events(self._reply.content):
                if event == b"[DONE]":
                    await self._keep()
                    done = True
                    yield event
                elif (told := self._spoken.hear(event)) is not None:
                    yield orjson.dumps(told)
            if not done:
                raise EngineError("it ended without [DONE]")
        except SpoolFull as error:
            log.error("reply_lost", msg_id=self._spoken.call.msg_id, reason=str(error))
            yield _error_event("the reply could not be stored", code="storage_full")
        except (aiohttp.ClientError, TimeoutError, EngineError) as error:
            self._spoken.transcript.broken = True
            log.warning("stream_broken", msg_id=self._spoken.call.msg_id, reason=repr(error))
            await self._keep_the_rest()
            yield _error_event("the engine broke off its reply", code="engine_error")


class _Posted:
    """A request on its way to an engine; connection failures become EngineError."""

    def __init__(self, session: aiohttp.ClientSession, body: bytes, headers: Mapping[str, str]) -> None:
        self._context = session.post(PATH, data=body, headers=headers)

    async def __aenter__(self) -> aiohttp.ClientResponse:
        with reaching_an_engine():
            return await self._context.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await self._context.__aexit__(*error)


async def unless_gone(receive: Callable[[], Awaitable[Message]], work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled when the client leaves before. Raises RequestRefused (499) then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestRefused("the client left", status=499, code="client_left")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_event(message: str, *, code: str) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": code}})


def _part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
