"""Clients that go on whatever happens, and write down what they saw with their own eyes."""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self, TypeVar

import httpx

from tests.doubles.engine import MODEL

_T = TypeVar("_T")

#: Seconds without a single success after which a client gives up, and the run has failed.
_PATIENCE_S = 300.0
_LONGEST_ROUND = 8
#: Without it, the load leaves services no processor to start again on.
_LONGEST_THOUGHT_S = 0.3
_JUDGED, _DOUBLED, _CORRECTED, _CORRECTED_LATE = 0.8, 0.15, 0.2, 0.1


@dataclass
class Judgement:
    """The rewards that were sent for a reply, and those that were acknowledged, in that order.

    `settled` is the last one acknowledged before the reply was committed: no trainer can have been earlier.
    """

    sent: list[float] = field(default_factory=list)
    acknowledged: list[float] = field(default_factory=list)
    settled: float | None = None

    @property
    def corrected_late(self) -> bool:
        return self.acknowledged[-1] != self.settled


@dataclass
class Book:
    """`replies` are the ids of those that were read to their end."""

    replies: list[str] = field(default_factory=list)
    judgements: dict[str, Judgement] = field(default_factory=dict)


class Load:
    """What asks in a thread of its own, from the beginning of a block to its end.

    What `_run` raises is raised at the end; it is to end when `_stop` is set.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self._work = self._thread.submit(lambda: asyncio.run(self._run()))
        return self

    def __exit__(self, *_: object) -> None:
        """Let everybody finish what he has begun."""
        self._stop.set()
        self._thread.shutdown()
        self._work.result()

    async def _run(self) -> None:
        raise NotImplementedError


class Crowd(Load):
    """Clients that ask in lanes, rate, correct and commit their own replies of `models`, and retry what fails."""

    def __init__(self, url: str, *, lanes: int, seed: int, models: Sequence[str] = (MODEL,)) -> None:
        super().__init__(url)
        self.book = Book()
        self._lanes, self._seed, self._models = lanes, seed, models

    @property
    def gave_up(self) -> bool:
        return self._work.done()

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=30) as http, asyncio.TaskGroup() as group:
            for number in range(self._lanes):
                lane = _Lane(http, self.book, f"lane-{number}", self._seed, self._models[number % len(self._models)])
                group.create_task(lane.run(self._stop))


class _Lane:
    def __init__(self, http: httpx.AsyncClient, book: Book, task: str, seed: int, model: str) -> None:
        self._http, self._book, self._task, self._model = http, book, task, model
        self._chance = random.Random(f"{task} {seed}")

    async def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            await self._round(self._chance.randint(1, _LONGEST_ROUND))

    async def _round(self, questions: int) -> None:
        judged = [each for each in [await self._exchange() for _ in range(questions)] if each is not None]
        for msg_id in self._some(judged, _CORRECTED):
            await self._judge(msg_id)
        for msg_id in judged:
            judgement = self._book.judgements[msg_id]
            judgement.settled = judgement.acknowledged[-1]
        await _until_done(lambda: self._post("/commit", {"task_id": self._task}))
        for msg_id in self._some(judged, _CORRECTED_LATE):
            await self._judge(msg_id)

    def _some(self, msg_ids: list[str], share: float) -> list[str]:
        return [each for each in msg_ids if self._chance.random() < share]

    async def _exchange(self) -> str | None:
        """The id of a reply that now has feedback; None if it is to have none."""
        await asyncio.sleep(self._chance.uniform(0, _LONGEST_THOUGHT_S))
        msg_id = await _until_done(self._stream if self._chance.random() < 0.5 else self._whole)
        self._book.replies.append(msg_id)
        if self._chance.random() >= _JUDGED:
            return None
        self._book.judgements[msg_id] = Judgement()
        await self._judge(msg_id)
        return msg_id

    async def _judge(self, msg_id: str) -> None:
        reward, times = self._chance.random(), 2 if self._chance.random() < _DOUBLED else 1
        await asyncio.gather(*(_until_done(lambda: self._tell(msg_id, reward)) for _ in range(times)))

    async def _tell(self, msg_id: str, reward: float) -> None:
        judgement = self._book.judgements[msg_id]
        judgement.sent.append(reward)
        await self._post("/feedback", {"msg_ids": [msg_id], "reward": reward})
        judgement.acknowledged.append(reward)

    async def _post(self, path: str, body: dict[str, object]) -> None:
        said = (await self._http.post(path, json=body)).raise_for_status().json()
        assert said["status"] == "success", said

    async def _whole(self) -> str:
        reply = await self._http.post("/v1/chat/completions", json=self._question(stream=False))
        msg_id: str = reply.raise_for_status().json()["id"]
        return msg_id

    async def _stream(self) -> str:
        """The id of a stream that was read to its `[DONE]`, and to the end of the connection's reply after it."""
        msg_id, done = "", False
        async with self._http.stream("POST", "/v1/chat/completions", json=self._question(stream=True)) as reply:
            async for line in reply.raise_for_status().aiter_lines():
                done = done or line == "data: [DONE]"
                if not msg_id and '"id":"' in line:
                    msg_id = line.split('"id":"', 1)[1].split('"', 1)[0]
        if not done:
            raise httpx.RemoteProtocolError("it ended without [DONE]")
        return msg_id

    def _question(self, *, stream: bool) -> dict[str, object]:
        messages = [{"role": "user", "content": "hi"}]
        return {"model": self._model, "messages": messages, "stream": stream, "metadata": {"task_id": self._task}}


async def _until_done(what: Callable[[], Awaitable[_T]]) -> _T:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return await what()
        except httpx.HTTPError as error:
            if time.monotonic() > deadline:
                raise AssertionError(f"no success for {_PATIENCE_S:g} s, at last {error!r}") from None
            await asyncio.sleep(0.1)
