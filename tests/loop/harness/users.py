"""Clients that try once, and write down what they were told and when: what an outage costs is read off their book."""

import asyncio
import random
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import yaml

from tests.doubles.engine import MODEL
from tests.loop.harness.services import make_model, write_settings

LANES = 6


class Failure(NamedTuple):
    """A request that did not end well: when the client began, when it noticed, and what it was told."""

    sent: float
    at: float
    error: httpx.HTTPError


@dataclass
class Book:
    """What the clients saw with their own eyes; `lanes` has the replies in the order in which each client got them."""

    replies: set[str] = field(default_factory=set)
    acknowledged: dict[str, float] = field(default_factory=dict)
    lanes: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    failures: list[Failure] = field(default_factory=list)


class Users:
    """Clients in a thread of their own, one question after the other in each lane, whatever happens.

    They think for `thought_s` between two, so that services have a processor to start again on.
    """

    def __init__(self, url: str, *, question: str = "hi", thought_s: float = 0.0) -> None:
        self.book = Book()
        self._url, self._said, self._thought_s = url, question, thought_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> "Users":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=30) as http:
            await asyncio.gather(self._commit(http), *(self._lane(http, number) for number in range(LANES)))

    async def _lane(self, http: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                msg_id = await (self._stream if chance.random() < 0.5 else self._whole)(http)
                self.book.replies.add(msg_id)
                self.book.lanes[number].append(msg_id)
                if chance.random() < 0.8:
                    reward = chance.random()
                    (await http.post("/feedback", json={"msg_ids": [msg_id], "reward": reward})).raise_for_status()
                    self.book.acknowledged[msg_id] = reward
                await asyncio.sleep(self._thought_s)
            except httpx.HTTPError as error:
                self.book.failures.append(Failure(began, time.monotonic(), error))
                await asyncio.sleep(0.1)

    async def _commit(self, http: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            await asyncio.sleep(0.5)
            try:
                await http.post("/commit")
            except httpx.HTTPError:
                continue

    async def _whole(self, http: httpx.AsyncClient) -> str:
        reply = await http.post("/v1/chat/completions", json=self.question(stream=False))
        msg_id: str = reply.raise_for_status().json()["id"]
        return msg_id

    async def _stream(self, http: httpx.AsyncClient) -> str:
        """The id of a stream that was read to its `[DONE]`."""
        msg_id = ""
        async with http.stream("POST", "/v1/chat/completions", json=self.question(stream=True)) as reply:
            async for line in reply.raise_for_status().aiter_lines():
                if line == "data: [DONE]":
                    return msg_id
                if line.startswith('data: {"error"'):
                    raise httpx.RemoteProtocolError(line)
                if '"id":"' in line:
                    msg_id = line.split('"id":"', 1)[1].split('"', 1)[0]
        raise httpx.RemoteProtocolError("it ended without [DONE]")

    def question(self, *, stream: bool) -> dict[str, object]:
        """What every client asks, again and again."""
        return {"model": MODEL, "messages": [{"role": "user", "content": self._said}], "stream": stream}


def attached_settings(folder: Path, url: str, **but: object) -> Path:
    """Settings of an experiment of the tiny model that an engine double at `url` serves."""
    config = write_settings(folder, make_model(folder / "model"), **but)
    values = yaml.safe_load(config.read_text())
    values["model"]["served_model_name"] = MODEL
    values["explorer"]["rollout_model"] = {"engine_urls": [url], "dtype": "float32"}
    config.write_text(yaml.safe_dump(values))
    return config
