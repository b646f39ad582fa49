"""Sends feedback on replies to the service, at once or through an outbox on disk."""

import asyncio
import atexit
import os
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

import httpx

from tuneloop.runner.errors import FeedbackAway, FeedbackRefused
from tuneloop.runner.feedback.feedback_outbox import FeedbackOutbox, RefusedEntry
from tuneloop.runner.feedback.sender import Rejected, Sender, TryLater, names_of, understand
from tuneloop.runner.feedback.verbs import Entry, FeedbackVerbs
from tuneloop.runner.http_client import absolute_url, header_of_key, tls_context
from tuneloop.runner.judging.endpoint import retry_after_s

_AT_EXIT_S = 2.0  # seconds for sending at exit; unsent feedback stays on disk
_BEFORE_COMMIT_S = 10.0  # seconds for sending before a commit


@dataclass(frozen=True, slots=True)
class Receipt:
    """The idempotency keys of accepted feedback, and the service's answer; {} while it waits in the outbox."""

    keys: tuple[str, ...]
    answer: Mapping[str, Any] = field(default_factory=dict)


class FeedbackBatch(FeedbackVerbs[None]):
    """Collects feedback for one call."""

    def __init__(self, source: str | None) -> None:
        self._source = source
        self.entries: list[Entry] = []

    def _take(self, entries: Sequence[Entry]) -> None:
        self.entries += entries


class _Client:
    def __init__(
        self,
        url: str,
        *,
        outbox: str | os.PathLike[str] | None = None,
        source: str | None = None,
        api_key: str | None = None,
        timeout: float = 10.0,
        max_bytes: int = 64 << 20,
    ) -> None:
        """Raises ValueError for an invalid URL or key, OSError for a folder without write access."""
        _import_ahead()
        self._url = absolute_url(url, "url", "http://localhost:8010").removesuffix("/v1")
        self._headers, self._timeout = header_of_key(api_key), timeout
        self._source: str | None = source
        self._sent = 0
        self._http: httpx.Client | None = None
        self._sender: Sender | None = None
        if outbox is not None:  # one folder per service
            folder = Path(outbox) / re.sub(r"[^A-Za-z0-9.]+", "-", self._url).strip("-")
            self._sender = Sender(FeedbackOutbox(folder, max_bytes), self._post, self._hang_up)
            self._sender.start()
            _with_outbox.add(self)

    @property
    def pending(self) -> int:
        """Unsent entries, including those of ended processes."""
        return self._sender.outbox.pending if self._sender else 0

    @property
    def sent(self) -> int:
        """Entries of this client that the service accepted."""
        return self._sender.outbox.sent if self._sender else self._sent

    @property
    def refused(self) -> int:
        """Entries set aside because the service will never accept them; see `refusals`."""
        return self._sender.outbox.refused if self._sender else 0

    @property
    def trouble(self) -> str | None:
        """Why sending fails now, or None."""
        return self._sender.trouble if self._sender else None

    def refusals(self) -> list[RefusedEntry]:
        """Entries that any process set aside in the outbox, oldest first."""
        return self._sender.outbox.refusals() if self._sender else []

    def _post(self, entries: Sequence[Entry]) -> httpx.Response | httpx.HTTPError:
        return self._request_now("feedback", {"feedback": list(entries)})

    def _request_now(self, path: str, body: Mapping[str, Any]) -> httpx.Response | httpx.HTTPError:
        if (client := self._http) is None:
            client = self._http = httpx.Client(verify=tls_context(), timeout=self._timeout, headers=self._headers)
        try:
            return client.post(f"{self._url}/{path}", json=body)
        except httpx.HTTPError as error:
            return error

    def _receipt(self, entries: Sequence[Entry], response: httpx.Response | httpx.HTTPError) -> Receipt:
        """Raises FeedbackRefused, FeedbackAway."""
        outcome = understand(entries, response)
        if isinstance(outcome, TryLater):
            raise FeedbackAway(outcome.reason, retry_after_s=outcome.wait_s)
        if isinstance(outcome, Rejected):
            raise FeedbackRefused(outcome.reason, outcome.answer)
        self._sent += len(entries) - len(outcome.refused)
        if outcome.refused:
            names = [name for place in outcome.refused for name in names_of(entries[place])]
            reason = next(iter(outcome.refused.values()))
            raise FeedbackRefused(f"{reason}: {', '.join(names[:3])}", outcome.answer)
        return Receipt(_keys(entries), outcome.answer)

    def _flush(self, timeout: float) -> bool:
        return self._sender.flush(timeout) if self._sender else True

    def _close(self, timeout: float) -> bool:
        _with_outbox.discard(self)
        if self._sender:
            return self._sender.close(timeout)
        self._hang_up()
        return True

    def _hang_up(self) -> None:
        client, self._http = self._http, None
        if client is not None:
            client.close()

    def _after_fork(self) -> None:
        self._http = None  # the connections are the parent's
        if self._sender:
            self._sender.after_fork()


class FeedbackClient(FeedbackVerbs[Receipt], _Client):
    """Sends feedback on replies: see FeedbackVerbs.

    With `outbox`, a folder, feedback is on disk when a call returns, and a thread sends it; after a crash, the next
    process that opens the folder does. Without one it is sent at once, and a failure raises FeedbackAway or
    FeedbackRefused.

    `source` is the default rater; `timeout` is per request, in seconds. Above `max_bytes` in the outbox, OutboxFull is
    raised.
    """

    @contextmanager
    def batch(self) -> Iterator[FeedbackBatch]:
        """Collect the block's feedback, and accept all of it or none at its end."""
        many = FeedbackBatch(self._source)
        yield many
        if many.entries:
            self._take(many.entries)

    def commit(self, task_id: str | None = None, run_id: str | None = None) -> int:
        """Release rewarded replies to the trainer; their number. Raises FeedbackAway."""
        if not self.flush(_BEFORE_COMMIT_S):
            raise FeedbackAway(f"feedback waits to be sent before a commit: {self.trouble}")
        return _count_of_commit(self._request_now("commit", {"task_id": task_id, "run_id": run_id}))

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait up to `timeout` seconds until all is sent; whether it is."""
        return self._flush(timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Flush and stop; unsent feedback stays on disk."""
        return self._close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self, entries: Sequence[Entry]) -> Receipt:
        if self._sender is None:
            return self._receipt(entries, self._post(entries))
        self._sender.put(entries)
        return Receipt(_keys(entries))


Feedback = FeedbackClient  # the public name; the services have a record named Feedback


class AsyncFeedback(FeedbackVerbs[Awaitable[Receipt]], _Client):
    """Feedback for one event loop: the same verbs, each awaited."""

    _client: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[FeedbackBatch]:
        """Collect the block's feedback without awaiting, and send it at its end."""
        many = FeedbackBatch(self._source)
        yield many
        if many.entries:
            await self._take(many.entries)

    async def commit(self, task_id: str | None = None, run_id: str | None = None) -> int:
        if not await self.flush(_BEFORE_COMMIT_S):
            raise FeedbackAway(f"feedback waits to be sent before a commit: {self.trouble}")
        return _count_of_commit(await self._request("commit", {"task_id": task_id, "run_id": run_id}))

    async def flush(self, timeout: float = 10.0) -> bool:  # noqa: ASYNC109 - returns False, raises nothing
        return await asyncio.to_thread(self._flush, timeout)

    async def close(self, timeout: float = 5.0) -> bool:  # noqa: ASYNC109
        if self._client is not None:
            await self._client.aclose()
        return await asyncio.to_thread(self._close, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _take(self, entries: Sequence[Entry]) -> Receipt:
        if (sender := self._sender) is not None:
            await asyncio.to_thread(sender.put, entries)
            return Receipt(_keys(entries))
        return self._receipt(entries, await self._request("feedback", {"feedback": list(entries)}))

    async def _request(self, path: str, body: Mapping[str, Any]) -> httpx.Response | httpx.HTTPError:
        if self._client is None:
            self._client = httpx.AsyncClient(verify=tls_context(), timeout=self._timeout, headers=self._headers)
        try:
            return await self._client.post(f"{self._url}/{path}", json=body)
        except httpx.HTTPError as error:
            return error


@cache
def _import_ahead() -> None:
    """Import what httpx and idna load lazily: a child forked during another thread's import keeps a partial module."""
    "".encode("idna")
    httpx.Client(verify=tls_context()).close()


def _keys(entries: Sequence[Entry]) -> tuple[str, ...]:
    return tuple(entry["idempotency_key"] for entry in entries)


def _count_of_commit(response: httpx.Response | httpx.HTTPError) -> int:
    if not isinstance(response, httpx.Response):
        raise FeedbackAway(f"the service does not answer: {response!r}")
    try:
        return int(response.raise_for_status().json()["committed"])
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
        reason = f"the service answered {response.status_code}: {response.text[:200]}"
        raise FeedbackAway(reason, retry_after_s=retry_after_s(response)) from None


_with_outbox: "weakref.WeakSet[_Client]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for client in list(_with_outbox):
        client._close(_AT_EXIT_S)


def _after_fork() -> None:
    for client in list(_with_outbox):
        client._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
