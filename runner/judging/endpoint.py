"""Asks a model behind an OpenAI-compatible endpoint for one JSON answer, with retries, blocking or async.

The generator `_conversation` decides on the next request without I/O; two loops drive it.
"""

import asyncio
import email.utils
import json
import random
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from tuneloop.runner.errors import JudgeAway, JudgeFailed
from tuneloop.runner.http_client import absolute_url, header_of_key
from tuneloop.runner.judging.prompts import Prompt

#: Longest wait before a retry. A longer one raises JudgeAway.
MAX_WAIT_S = 30.0

#: Fields that are dropped if an endpoint refuses them. `store`: false keeps judging out of a tuneloop's training data.
_OPTIONAL = ("response_format", "temperature", "store")

_ERROR_START = 300  # characters at the start of an error that are searched for its cause
_HEADERS_READ = frozenset({"content-type", "retry-after"})  # headers that are kept of an answer

_BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_NOT_LET_IN = frozenset({401, 402, 403, 404, 405})


class Answer(NamedTuple):
    """The model's text, and its tokens (0 if the endpoint does not report them)."""

    text: str
    prompt_tokens: int
    completion_tokens: int


_Step = dict[str, Any] | float  # the next step: a body to post, or seconds to wait
_Response = httpx.Response | httpx.HTTPError | None


@dataclass(kw_only=True)
class Endpoint:
    """An OpenAI-compatible endpoint: `base_url` ends in /v1, as in OpenAI's clients.

    `temperature` None is not sent. `timeout` is per request, in seconds; `retries` apply to connection errors, 429 and
    5xx. At most `concurrency` blocking and as many async requests run at once.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    temperature: float | None = 0.0
    timeout: float = 60.0
    retries: int = 2
    concurrency: int = 8
    _refused: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        self._url = f"{absolute_url(self.base_url, 'base_url', 'https://host/v1')}/chat/completions"
        if not (self.timeout > 0 and self.retries >= 0 and self.concurrency >= 1):
            raise ValueError("timeout must be above 0, retries not below 0, concurrency at least 1")
        headers = header_of_key(self.api_key)
        self._places = threading.BoundedSemaphore(self.concurrency)
        self._client = httpx.Client(timeout=self.timeout, headers=headers)
        self._async_places = asyncio.Semaphore(self.concurrency)
        self._async_client = httpx.AsyncClient(timeout=self.timeout, headers=headers)

    def ask(self, prompt: Prompt, schema: Mapping[str, Any]) -> Answer:
        """One answer that should fit the schema. Raises JudgeError."""
        talk = self._conversation(prompt, schema)
        response: _Response = None
        with self._places:
            while True:
                try:
                    step = talk.send(response)
                except StopIteration as end:
                    return Answer(*end.value)
                response = None
                if isinstance(step, float):
                    time.sleep(step)
                else:
                    response = self._post(step)

    async def ask_async(self, prompt: Prompt, schema: Mapping[str, Any]) -> Answer:
        """As `ask`, async. Use it in one event loop only."""
        talk = self._conversation(prompt, schema)
        response: _Response = None
        async with self._async_places:
            while True:
                try:
                    step = talk.send(response)
                except StopIteration as end:
                    return Answer(*end.value)
                response = None
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    response = await self._post_async(step)

    def close(self) -> None:
        self._client.close()

    async def close_async(self) -> None:
        """Close the connections of `ask_async` and `ask`."""
        await self._async_client.aclose()
        self.close()

    @contextmanager
    def open(self) -> Iterator["Endpoint"]:
        """Yield itself, and close it at the end."""
        try:
            yield self
        finally:
            self.close()

    def _post(self, body: dict[str, Any]) -> _Response:
        until = time.monotonic() + self.timeout
        read = bytearray()
        try:
            with self._client.stream("POST", self._url, json=body) as response:
                for piece in response.iter_bytes():
                    # httpx bounds only the time between two bytes.
                    if time.monotonic() > until:
                        return httpx.ReadTimeout(f"no answer in {self.timeout:g} s")
                    read += piece
        except httpx.HTTPError as error:
            return error
        headers = {name: value for name, value in response.headers.items() if name in _HEADERS_READ}
        return httpx.Response(response.status_code, headers=headers, content=bytes(read), request=response.request)

    async def _post_async(self, body: dict[str, Any]) -> _Response:
        try:
            async with asyncio.timeout(self.timeout):
                return await self._async_client.post(self._url, json=body)
        except httpx.HTTPError as error:
            return error
        except TimeoutError:
            return httpx.ReadTimeout(f"no answer in {self.timeout:g} s")

    def _conversation(self, prompt: Prompt, schema: Mapping[str, Any]) -> Generator[_Step, _Response, Answer]:
        """Yield the next step until there is an answer."""
        shape = {"name": "answer", "strict": True, "schema": schema}
        body: dict[str, Any] = {
            "model": self.model,
            "messages": prompt,
            "store": False,
            "response_format": {"type": "json_schema", "json_schema": shape},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        body = {key: value for key, value in body.items() if key not in self._refused}
        left = self.retries
        dropped: set[str] = set()
        while True:
            response = yield body
            if isinstance(response, httpx.Response) and response.is_success:
                self._refused |= dropped
                return _answer(response)
            if isinstance(response, httpx.Response) and (name := _unknown_field(response, body)):
                dropped.add(name)
                body = {key: value for key, value in body.items() if key != name}
                continue
            barred, wait = False, None
            if isinstance(response, httpx.Response):
                status, wait = response.status_code, retry_after_s(response)
                barred = status in _NOT_LET_IN or response.is_redirect  # permanent until a setting changes
                if not barred and status not in _BUSY and status < 500:
                    raise JudgeFailed(*_refusal(response))
            away = JudgeAway(*_refusal(response), retry_after_s=wait)
            if wait is None:  # exponential with jitter, from 0.5 s
                wait = min(MAX_WAIT_S, 0.5 * 2 ** (self.retries - left)) * random.uniform(0.5, 1.0)
            if left <= 0 or wait > MAX_WAIT_S or barred:
                raise away
            left -= 1
            yield wait


def _unknown_field(response: httpx.Response, body: Mapping[str, Any]) -> str | None:
    """The optional field that the endpoint refuses; `response_format` also if no field is named."""
    if response.status_code not in {400, 422, 501}:
        return None
        # Only the start: the end may quote a user's text.
    named = next((name for name in _OPTIONAL if name in body and name in response.text[:_ERROR_START]), None)
    return named or ("response_format" if "response_format" in body else None)


def retry_after_s(response: httpx.Response) -> float | None:
    """Seconds of a Retry-After header, from a number or a date; None without one."""
    value = response.headers.get("retry-after", "")
    try:
        if value.strip().replace(".", "", 1).isdigit() and value.isascii():
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _refusal(response: _Response) -> tuple[str, str]:
    if isinstance(response, httpx.Response):
        return f"the judge answered {response.status_code}", response.text
    return "the judge does not answer", repr(response)


def _answer(response: httpx.Response) -> Answer:
    """The model's text. Raises JudgeFailed unless it is complete."""
    try:
        body = json.loads(response.content)
        choice, usage = body["choices"][0], body.get("usage") or {}
        text, ending = choice["message"]["content"], choice.get("finish_reason")
        tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise JudgeFailed("the judge's answer is not a chat completion", response.text) from None
    if ending not in {None, "stop"}:
        raise JudgeFailed("the judge did not answer to the end", f"finish_reason {ending!r}")
    if not isinstance(text, str) or not text.strip():
        raise JudgeFailed("the judge's answer is empty")
    return Answer(text, *tokens)
