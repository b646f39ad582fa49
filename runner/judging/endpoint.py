"""Asks a model behind an OpenAI-compatible endpoint for one answer in JSON, with patience, blocking or not.

What is asked next is decided by a generator that does no input or output (`_conversation`); two loops drive it.
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

#: The longest that we wait by ourselves before asking again. A longer wait raises JudgeAway.
MAX_WAIT_S = 30.0

#: Fields that some endpoints do not know: left out where they refuse them. `store` keeps the question out of storage;
#: a tuneloop honours it, so that judging never becomes training data.
_OPTIONAL = ("response_format", "temperature", "store")

#: Characters of an error in which it says what is wrong.
_TELLING = 300

#: What is read of an answer's headers.
_TOLD = frozenset({"content-type", "retry-after"})

_BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_NOT_LET_IN = frozenset({401, 402, 403, 404, 405})


class Answer(NamedTuple):
    """What the model wrote, and the tokens that it took (0 where the endpoint does not say)."""

    text: str
    prompt_tokens: int
    completion_tokens: int


#: What to do next: post a body, or wait so many seconds.
_Step = dict[str, Any] | float
_Response = httpx.Response | httpx.HTTPError | None


@dataclass(kw_only=True)
class Endpoint:
    """An OpenAI-compatible endpoint: `base_url` ends in /v1, as OpenAI's clients want it.

    `temperature` None is not sent. `timeout` is in seconds, of one request; `retries` are for what passes: no
    connection, 429, 5xx. At most `concurrency` requests are under way at once, of each of the two kinds.
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
        """One answer, which should fit the schema. Raises JudgeError if there is none."""
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
        """The same without blocking. Use it in one event loop only."""
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
        """Close the connections of `ask`."""
        self._client.close()

    async def close_async(self) -> None:
        """Close those of `ask_async`, and of `ask`."""
        await self._async_client.aclose()
        self.close()

    @contextmanager
    def open(self) -> Iterator["Endpoint"]:
        """Itself, closed in the end."""
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
                    # httpx only bounds the time between two bytes.
                    if time.monotonic() > until:
                        return httpx.ReadTimeout(f"no answer in {self.timeout:g} s")
                    read += piece
        except httpx.HTTPError as error:
            return error
        headers = {name: value for name, value in response.headers.items() if name in _TOLD}
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
        """What to do next, until there is an answer."""
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
                barred = status in _NOT_LET_IN or response.is_redirect  # until a setting is changed
                if not barred and status not in _BUSY and status < 500:
                    raise JudgeFailed(*_refusal(response))
            away = JudgeAway(*_refusal(response), retry_after_s=wait)
            if wait is None:  # half a second, and twice as long each time; not everybody's at once
                wait = min(MAX_WAIT_S, 0.5 * 2 ** (self.retries - left)) * random.uniform(0.5, 1.0)
            if left <= 0 or wait > MAX_WAIT_S or barred:
                raise away
            left -= 1
            yield wait


def _unknown_field(response: httpx.Response, body: Mapping[str, Any]) -> str | None:
    """The field of ours that the endpoint does not take. Only `response_format` is tried without being named."""
    if response.status_code not in {400, 422, 501}:
        return None
    # Not the whole text: what is quoted at its end may be a user's words.
    named = next((name for name in _OPTIONAL if name in body and name in response.text[:_TELLING]), None)
    return named or ("response_format" if "response_format" in body else None)


def retry_after_s(response: httpx.Response) -> float | None:
    """How many seconds the server asks us to wait, by a number or a date; None where it says neither."""
    said = response.headers.get("retry-after", "")
    try:
        if said.strip().replace(".", "", 1).isdigit() and said.isascii():
            return float(said)
        return max(0.0, email.utils.parsedate_to_datetime(said).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _refusal(response: _Response) -> tuple[str, str]:
    if isinstance(response, httpx.Response):
        return f"the judge answered {response.status_code}", response.text
    return "the judge does not answer", repr(response)


def _answer(response: httpx.Response) -> Answer:
    """What the model said. Raises JudgeFailed unless it said it to the end."""
    try:
        said = json.loads(response.content)
        choice, usage = said["choices"][0], said.get("usage") or {}
        text, ending = choice["message"]["content"], choice.get("finish_reason")
        tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise JudgeFailed("the judge's answer is not a chat completion", response.text) from None
    if ending not in {None, "stop"}:
        raise JudgeFailed("the judge did not answer to the end", f"finish_reason {ending!r}")
    if not isinstance(text, str) or not text.strip():
        raise JudgeFailed("the judge's answer is empty")
    return Answer(text, *tokens)
