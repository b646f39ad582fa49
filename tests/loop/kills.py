"""SIGKILL at random moments under load, and a comparison of the client's own book with the ledger.

The engine is the double that replays vLLM's bytes, so that a run of many kills takes minutes; explorer, trainer and
database are real, and are processes.
"""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml
from sqlalchemy import select

from shared.config import Settings
from shared.database import connect
from shared.experience import State
from shared.ledger import Ledger
from shared.schema import experiences, feedback
from tests.doubles.engine import MODEL, EngineDouble
from tests.doubles.serving import serving
from tests.loop.services import Service, ledger_of, make_model, wait_for, write_settings

BATCH, LANES = 16, 6


@dataclass
class Book:
    """What the client saw with its own eyes."""

    replies: set[str] = field(default_factory=set)
    acknowledged: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What came of a run: all but the first three must be nothing."""

    kills: int
    exchanges: int
    feedbacks: int
    exchanges_lost: int
    feedbacks_lost: int
    rewards_wrong: int
    imbalance: tuple[str, ...]
    steps_not_accounted_for: int


class Crowd:
    """Clients in a thread of their own that go on whatever happens, one question after the other in each lane."""

    def __init__(self, url: str, lanes: int) -> None:
        self.book = Book()
        self._url, self._lanes = url, lanes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> "Crowd":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=30) as http:
            await asyncio.gather(self._commit(http), *(self._lane(http, random.Random(n)) for n in range(self._lanes)))

    async def _lane(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        while not self._stop.is_set():
            try:
                msg_id = await (self._stream if chance.random() < 0.5 else self._whole)(http)
                self.book.replies.add(msg_id)
                if chance.random() < 0.8:
                    reward = chance.random()
                    (await http.post("/feedback", json={"msg_ids": [msg_id], "reward": reward})).raise_for_status()
                    self.book.acknowledged[msg_id] = reward
            except httpx.HTTPError:
                await asyncio.sleep(0.1)

    async def _commit(self, http: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            await asyncio.sleep(0.5)
            try:
                await http.post("/commit")
            except httpx.HTTPError:
                continue

    async def _whole(self, http: httpx.AsyncClient) -> str:
        reply = await http.post("/v1/chat/completions", json=_question(stream=False))
        msg_id: str = reply.raise_for_status().json()["id"]
        return msg_id

    async def _stream(self, http: httpx.AsyncClient) -> str:
        """The id of a stream that was read to its `[DONE]`."""
        msg_id = ""
        async with http.stream("POST", "/v1/chat/completions", json=_question(stream=True)) as reply:
            async for line in reply.raise_for_status().aiter_lines():
                if line == "data: [DONE]":
                    return msg_id
                if '"id":"' in line:
                    msg_id = line.split('"id":"', 1)[1].split('"', 1)[0]
        raise httpx.RemoteProtocolError("it ended without [DONE]")


def _question(*, stream: bool) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream}


@contextmanager
def both(config: Path) -> Iterator[dict[str, Service]]:
    services = {name: Service(config, name) for name in ("explorer", "trainer")}
    try:
        services["explorer"].wait_until_ready()
        yield services
    finally:
        for service in services.values():
            service.kill()


def run(folder: Path, *, kills: int, seed: int = 0, longest_pause_s: float = 3.0, **but: object) -> Report:
    """Kill explorer or trainer `kills` times; `but` are sections of the settings."""
    chance, double = random.Random(seed), EngineDouble(answers_probes_by_manifest=True, piece_pause_s=0.002)
    with serving(double) as url:
        config = _settings(folder, url, **but)
        with both(config) as services:
            with Crowd(services["explorer"].url, LANES) as crowd:
                for _ in range(kills):
                    threading.Event().wait(chance.uniform(0.1, longest_pause_s))
                    name = chance.choice(["explorer", "trainer"])
                    services[name].kill()
                    services[name] = Service(config, name)
                services["explorer"].wait_until_ready()
                threading.Event().wait(longest_pause_s)
            settings = services["explorer"].settings
            ledger = ledger_of(settings)
            try:
                return _compared(settings, ledger, crowd.book, kills)
            finally:
                ledger.close()


def _settings(folder: Path, url: str, **but: object) -> Path:
    config = write_settings(folder, make_model(folder / "model"), **{"buffer": {"train_batch_size": BATCH}} | but)
    values = yaml.safe_load(config.read_text())
    values["model"]["served_model_name"] = MODEL
    values["explorer"]["rollout_model"] = {"engine_urls": [url], "dtype": "float32"}
    config.write_text(yaml.safe_dump(values))
    return config


def _compared(settings: Settings, ledger: Ledger, book: Book, kills: int) -> Report:
    """Wait until nothing moves any more, then compare."""
    url = f"http://127.0.0.1:{settings.explorer.proxy_port}"
    wait_for(lambda: httpx.post(f"{url}/commit").status_code == 200, timeout_s=60)
    wait_for(
        lambda: ledger.counts()[State.COMMITTED] + ledger.counts()[State.LEASED] < BATCH,
        timeout_s=300,
        why=f"the trainer does not get through: {ledger.counts()}",
    )
    engine = connect(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
    with engine.connect() as connection:
        rewards = {
            row.msg_id: row.reward for row in connection.execute(select(experiences.c.msg_id, experiences.c.reward))
        }
        heard = set(connection.execute(select(feedback.c.msg_id).distinct()).scalars())
    engine.dispose()
    return Report(
        kills=kills,
        exchanges=len(book.replies),
        feedbacks=len(book.acknowledged),
        exchanges_lost=len(book.replies - rewards.keys()),
        feedbacks_lost=len(book.acknowledged.keys() - heard),
        rewards_wrong=sum(rewards.get(msg_id) != reward for msg_id, reward in book.acknowledged.items()),
        imbalance=tuple(ledger.imbalance()),
        steps_not_accounted_for=ledger.newest().step * BATCH - ledger.counts()[State.TRAINED],
    )
