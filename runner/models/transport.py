"""HTTP transports that record each request for a reply, over connections that all runs of a process share.

A client per run would read the machine's certificates and open connections each time. Pools exist per event loop, and
one for threads; a forked process starts with none.

The transports use the library of `openai`'s clients, httpx or from version 3 httpx2: converting requests between the
two costs more than all else that a run does.
"""

import asyncio
import atexit
import importlib
import json
import os
import re
import time
import types
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from tuneloop.runner.http_client import tls_context
from tuneloop.runner.models.run import ModelCall, RunCalls

_SAMPLING = ("/chat/completions", "/completions", "/responses", "/messages")  # path endings of requests for replies
_AWAY = {429, 502, 503, 504}  # statuses of a service that is unavailable for now

#: Marks at the end of a complete stream, and of one that the service broke off.
_WHOLE = re.compile(rb"^(data: ?\[DONE\]|event: ?(message_stop|response\.(completed|incomplete)))", re.MULTILINE)
_BROKEN = re.compile(rb'^(data: ?\{"error"|event: ?(error|response\.failed))', re.MULTILINE)
_LONGEST_END = 40

_TAIL = 32 << 10  # bytes at the end of a stream that are searched for its usage

#: Unbounded: the service has its own limit. Idle connections close before the service closes them: it would lose a
#: request sent at that moment.
_LIMITS = {"max_connections": None, "max_keepalive_connections": None, "keepalive_expiry": 3.0}

_async_pools: dict[asyncio.AbstractEventLoop, "_LoopPools"] = {}
_pools: dict[tuple[int, str, str | None], Any] = {}


def client_arguments(calls: RunCalls, timeout_s: float, *, sync: bool) -> dict[str, Any]:
    """Arguments of an `openai` client. The environment is ignored: its proxies would bypass the transport."""
    library = _library()
    timeout = library.Timeout(timeout_s, connect=10.0)
    base, transport = (library.BaseTransport, _Transport) if sync else (library.AsyncBaseTransport, _AsyncTransport)
    made = library.Client if sync else library.AsyncClient
    client = made(transport=_subclass_of(transport, base)(library, calls), trust_env=False, timeout=timeout)
    return {"http_client": client, "timeout": timeout}


@lru_cache
def _library() -> Any:
    """The HTTP library of `openai`, otherwise httpx."""
    try:
        from openai import DefaultAsyncHttpxClient
    except ImportError:
        return importlib.import_module("httpx")
    names = (each.__module__.partition(".")[0] for each in DefaultAsyncHttpxClient.__mro__)
    return importlib.import_module(next((name for name in names if name in ("httpx", "httpx2")), "httpx"))


@lru_cache
def _subclass_of(ours: type, base: type) -> type:
    return types.new_class(ours.__name__, (ours, base))


class _Transport:
    def __init__(self, library: Any, calls: RunCalls) -> None:
        self._library, self._calls = library, calls

    def handle_request(self, request: Any) -> Any:
        observed = _Observed(request, self._calls)
        try:
            key = os.getpid(), self._library.__name__, _proxy_of(request.url)
            if key not in _pools:
                limits = self._library.Limits(**_LIMITS)
                made = self._library.HTTPTransport(verify=tls_context(), limits=limits, proxy=key[2])
                _pools.setdefault(key, made)
            response = _pools[key].handle_request(request)
        except self._library.TransportError:
            observed.end(lost=True)
            raise
        observed.begin(response)
        response.stream = _subclass_of(_Stream, self._library.SyncByteStream)(response.stream, observed)
        return response


class _AsyncTransport:
    """For event loops; a client may be used in several loops, one after the other."""

    def __init__(self, library: Any, calls: RunCalls) -> None:
        self._library, self._calls = library, calls

    async def handle_async_request(self, request: Any) -> Any:
        observed = _Observed(request, self._calls)
        try:
            loop = asyncio.get_running_loop()
            pools = _async_pools.get(loop)
            if pools is None:
                for ended in [each for each in list(_async_pools) if each.is_closed()]:
                    _async_pools.pop(ended, None)
                pools = _async_pools[loop] = _LoopPools(loop)
                await anext(pools.closing)
            key = self._library.__name__, _proxy_of(request.url)
            if key not in pools:
                pools[key] = self._library.AsyncHTTPTransport(
                    verify=tls_context(), limits=self._library.Limits(**_LIMITS), proxy=key[1]
                )
            pool = pools[key]
            response = await pool.handle_async_request(request)
        except self._library.TransportError:
            observed.end(lost=True)
            raise
        except asyncio.CancelledError:
            observed.end()
            raise
        observed.begin(response)
        response.stream = _subclass_of(_AsyncStream, self._library.AsyncByteStream)(response.stream, observed)
        return response


class _LoopPools(dict[tuple[str, str | None], Any]):
    """The pools of one event loop, closed with it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.closing = self._close_at_end(loop)

    async def _close_at_end(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        """Runs at the latest in the loop's `shutdown_asyncgens`."""
        try:
            yield
        finally:
            if _async_pools.get(loop) is self:
                del _async_pools[loop]
            for pool in self.values():
                await pool.aclose()


async def close_connections() -> None:
    """Close the running loop's connections now; otherwise `asyncio.run` closes them."""
    pools = _async_pools.pop(asyncio.get_running_loop(), None)
    if pools is not None:
        await pools.closing.aclose()


@atexit.register
def _close_pools() -> None:
    for key, pool in list(_pools.items()):
        if key[0] == os.getpid():
            pool.close()


def _proxy_of(url: Any) -> str | None:
    if url.host in {"127.0.0.1", "localhost", "::1"}:
        return None
    found = urllib.request.getproxies()
    proxy = found.get(url.scheme) or found.get("all")
    return None if proxy is None or urllib.request.proxy_bypass(url.host) else proxy


class _Observed:
    def __init__(self, request: Any, calls: RunCalls) -> None:
        self._path = request.url.path
        self._add: Callable[[ModelCall], None] | None = None
        if request.method == "POST" and self._path.endswith(_SAMPLING):
            self._add = calls.add
        self._request = hash((self._path, request.content)) if self._add else 0
        self._started = time.monotonic()
        self._response: Any = None
        self._streams = self._whole = self._broken = False
        self._data = bytearray()

    def begin(self, response: Any) -> None:
        self._response = response
        self._streams = response.headers.get("content-type", "").startswith("text/event-stream")

    def feed(self, data: bytes) -> None:
        if self._add is None:
            return
        self._data += data
        if self._streams:
            new = max(0, len(self._data) - len(data) - _LONGEST_END)
            self._whole = self._whole or _WHOLE.search(self._data, new) is not None
            self._broken = self._broken or _BROKEN.search(self._data, new) is not None
        if self._streams and len(self._data) > 2 * _TAIL:
            del self._data[:-_TAIL]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Record the call when its body is complete or broken; not when the reader stops early."""
        try:
            yield
        except Exception:
            self.end(lost=True)
            raise
        self.end(read=True)

    def end(self, *, read: bool = False, lost: bool = False) -> None:
        """Record the call; `read`: the body was read to the end."""
        add, self._add = self._add, None
        if add is None:
            return
        response = self._response
        headers, status = ({}, 0) if response is None else (response.headers, response.status_code)
        body = _last_event(bytes(self._data)) if self._streams else _object(bytes(self._data))
        version = headers.get("x-tuneloop-version")
        # Our header has the id for each route and each partial stream.
        msg_id = headers.get("x-request-id") if version is not None else body.get("id")
        usage = body.get("usage") or {}
        add(
            ModelCall(
                path=self._path,
                status=status,
                msg_id=msg_id or body.get("id"),
                model_version=None if version is None else int(version),
                prompt_tokens=usage.get("prompt_tokens", usage.get("input_tokens")),
                completion_tokens=usage.get("completion_tokens", usage.get("output_tokens")),
                duration_s=time.monotonic() - self._started,
                lost=lost or status in _AWAY or self._broken or (read and self._streams and not self._whole),
                request=self._request,
                sent_s=self._started,
            )
        )


class _Stream:
    def __init__(self, stream: Any, observed: _Observed) -> None:
        self._stream, self._observed = stream, observed

    def __iter__(self) -> Iterator[bytes]:
        with self._observed.reading():
            for data in self._stream:
                self._observed.feed(data)
                yield data

    def close(self) -> None:
        self._observed.end()
        self._stream.close()


class _AsyncStream:
    def __init__(self, stream: Any, observed: _Observed) -> None:
        self._stream, self._observed = stream, observed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._observed.reading():
            async for data in self._stream:
                self._observed.feed(data)
                yield data

    async def aclose(self) -> None:
        self._observed.end()
        await self._stream.aclose()


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _last_event(data: bytes) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for line in reversed(data.split(b"\n")):
        if not line.startswith(b"data: {"):
            continue
        event = _object(line[6:])
        event = event.get("response") or event  # the responses route wraps it
        last = last or event
        if event.get("usage"):
            return event
        if last and b"usage" not in data:
            break
    return last
