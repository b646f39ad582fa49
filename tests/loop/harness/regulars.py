"""Users with names who ask again and again, note which version answered, and reward it with what it is worth."""

import asyncio
import itertools
import random
import time
from typing import Any, NamedTuple

import httpx

from tests.loop.harness.crowd import Load

USERS = [f"user-{number}" for number in range(40)]

_LANES = 6
#: Much less, and the load leaves the engines no processor to take up versions.
_THOUGHT_S = 0.2
_SPREAD = (-0.1, 0.0, 0.1)


class Answer(NamedTuple):
    """Who answered whom; `heard` is when the user learnt of it."""

    user: str
    version: int
    sent: float
    heard: float


class Failure(NamedTuple):
    """A request that did not end well, when the user began, when he noticed, and what he was told."""

    sent: float
    at: float
    user: str
    what: str


class Regulars(Load):
    """The users, a few of them at a time; every other reply is streamed.

    `worth` is what they reward each version with, or a little more or less; others get no feedback.
    """

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url)
        self.answers: list[Answer] = []
        self.failures: list[Failure] = []
        self.worth: dict[int, float] = {}
        self._model = model

    def since(self, then: float) -> list[Answer]:
        """What was answered to requests that were sent since then."""
        return [each for each in [*self.answers] if each.sent >= then]

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as http, asyncio.TaskGroup() as group:
            for number in range(_LANES):
                group.create_task(self._lane(http, USERS[number::_LANES]))

    async def _lane(self, http: httpx.AsyncClient, users: list[str]) -> None:
        chance = random.Random(users[0])
        for user, stream in zip(itertools.cycle(users), itertools.cycle([False, True, True]), strict=False):
            if self._stop.is_set():
                return
            began = time.time()
            try:
                msg_id, version = await self._ask(http, user, stream=stream)
                if version in self.worth:
                    reward = self.worth[version] + chance.choice(_SPREAD)
                    (await http.post("/feedback", json={"msg_ids": [msg_id], "reward": reward})).raise_for_status()
            except httpx.HTTPError as error:
                self.failures.append(Failure(began, time.time(), user, repr(error)))
            await asyncio.sleep(_THOUGHT_S)

    async def _ask(self, http: httpx.AsyncClient, user: str, *, stream: bool) -> tuple[str, int]:
        """The id of a reply that was read to its end, and the version that wrote it."""
        sent, msg_id, last = time.time(), "", ""
        body: dict[str, Any] = {
            "model": self._model,
            # Always another one: who asks the same again is answered by the engine that knows it.
            "messages": [{"role": "user", "content": f"{sent}: once upon a time"}],
            "max_tokens": 12,
            "ignore_eos": True,
            "user": user,
            "stream": stream,
        }
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            version = int(reply.raise_for_status().headers["x-tuneloop-version"])
            self.answers.append(Answer(user, version, sent, time.time()))
            async for line in reply.aiter_lines():
                if line.startswith('data: {"error"'):
                    raise httpx.RemoteProtocolError(line)
                if not msg_id and '"id":"' in line:
                    msg_id = line.split('"id":"', 1)[1].split('"', 1)[0]
                last = line or last
        if stream and last != "data: [DONE]":
            raise httpx.RemoteProtocolError("it ended without [DONE]")
        return msg_id, version
