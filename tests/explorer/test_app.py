"""What only the parts put together by hand, or another database, can show."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from tests.doubles import postgres
from tests.doubles.engine import CHAT, EngineDouble
from tests.doubles.serving import serving
from tests.explorer.running import HELLO, eventually, explorer_running, settings_for
from tests.explorer.whole import create_app
from tuneloop.explorer.dialects.dialect import ChatDialect
from tuneloop.explorer.edge import Edge, Http11
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.engines.vllm import EngineControl, open_session
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.proxy.proxy import Proxy
from tuneloop.explorer.recorder import OutboxLimits, Recorder
from tuneloop.explorer.routes.passthrough import remembered_context_length
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.runner.outbox import Outbox
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.reports import Reports
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.schema import metadata


@asynccontextmanager
async def chat_by_hand(tmp_path: Path, double: EngineDouble, *, patience_s: float = 1.0) -> AsyncIterator[Any]:
    """The chat route alone, with an engine that counts as one of our own, on the CPU."""
    outbox, metrics = Outbox(tmp_path / "outbox", 1 << 20), Metrics()
    http = EngineHttp(url=double.url)
    async with open_session(url=double.url, socket=None, key=None) as session:
        fleet = Fleet([Engine(0, http, EngineControl(session, model_name="t"))], wait_timeout_s=patience_s)
        limits = OutboxLimits(outbox, max_bytes=1 << 20, max_age_s=60)
        recorder = Recorder(outbox, limits, metrics, wake_drain=lambda: None)
        proxy = Proxy(
            settings_for(tmp_path),
            fleet,
            signer=ReplyIdSigner(b"k" * 32),
            recorder=recorder,
            metrics=metrics,
            find_context_length=remembered_context_length(fleet),
        )
        app = Edge(FastAPI(), {CHAT: partial(proxy.answer, ChatDialect())})
        config = uvicorn.Config(app, log_level="critical", lifespan="off")
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(lambda: Http11(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            yield client, fleet
        for connection in state.connections:
            connection.shutdown()
    await http.close()
    await recorder.close()
    outbox.close()


async def test_on_the_cpu_a_seed_is_left_out_and_that_is_said(tmp_path: Path, double: EngineDouble) -> None:
    async with chat_by_hand(tmp_path, double) as (http, fleet):
        await fleet.set_state(fleet.engines[0], EngineState.READY)
        reply = await http.post(CHAT, json=HELLO | {"seed": 5})
        assert (reply.status_code, reply.headers["x-tuneloop-ignored"]) == (200, "seed")
        assert "seed" not in double.chats[0].body
        assert "x-tuneloop-ignored" not in (await http.post(CHAT, json=HELLO)).headers


async def test_on_engines_of_others_a_seed_is_passed_on(tmp_path: Path, double: EngineDouble) -> None:
    with explorer_running(settings_for(tmp_path, [double.url])) as explorer:
        reply = await asyncio.to_thread(explorer.chat, seed=5)
    assert "x-tuneloop-ignored" not in reply.headers
    assert double.chats[0].body["seed"] == 5


async def test_requests_wait_for_an_engine_that_will_be_ready(tmp_path: Path, double: EngineDouble) -> None:
    async with chat_by_hand(tmp_path, double) as (http, fleet):
        await fleet.set_state(fleet.engines[0], EngineState.RELOADING)
        asking = asyncio.ensure_future(http.post(CHAT, json=HELLO))
        await asyncio.sleep(0.1)
        assert not asking.done()
        await fleet.set_state(fleet.engines[0], EngineState.READY)
        assert (await asking).status_code == 200


@pytest.mark.parametrize("state", [EngineState.RELOADING, EngineState.DOWN, EngineState.STARTING])
async def test_requests_do_not_wait_for_ever(tmp_path: Path, double: EngineDouble, state: EngineState) -> None:
    async with chat_by_hand(tmp_path, double, patience_s=0.2) as (http, fleet):
        await fleet.set_state(fleet.engines[0], state)
        reply = await http.post(CHAT, json=HELLO)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
        assert reply.headers["retry-after"] == "2"


async def test_a_waiting_request_is_told_when_the_last_engine_goes(tmp_path: Path, double: EngineDouble) -> None:
    async with chat_by_hand(tmp_path, double, patience_s=30) as (http, fleet):
        await fleet.set_state(fleet.engines[0], EngineState.RELOADING)
        asking = asyncio.ensure_future(http.post(CHAT, json=HELLO))
        await asyncio.sleep(0.05)
        await fleet.set_state(fleet.engines[0], EngineState.DOWN)
        assert (await asyncio.wait_for(asking, 1)).status_code == 503


def test_a_stream_longer_than_the_last_deadline_is_kept_as_cut_off(tmp_path: Path, double: EngineDouble) -> None:
    settings = settings_for(tmp_path, [double.url])
    engine = connect(f"sqlite:///{tmp_path}/ledger.db")
    metadata.create_all(engine)
    ledger = Ledger(engine)
    ledger.versions.ensure_base(settings.model.model_path)
    double.piece_pause_s = 0.5

    def ask(url: str) -> None:
        with (
            pytest.raises(httpx.TransportError),
            httpx.stream("POST", url + CHAT, json=HELLO | {"stream": True}) as reply,
        ):
            list(reply.iter_raw())

    with serving(create_app(settings, ledger, on_failure=lambda _: None), drain_s=1) as url:
        eventually(lambda: httpx.get(url + "/health/ready", timeout=60).status_code == 200)
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        eventually(lambda: len(double.chats) == 1)
        time.sleep(1.2)
    asking.join()
    eventually(lambda: double.left == 1)
    assert ledger.reports.counts()[State.DROPPED] == 1
    ledger.close()


@pytest.mark.postgres
def test_through_a_real_outage_of_postgres_nothing_is_lost(tmp_path: Path, double: EngineDouble) -> None:
    server = postgres.started()
    engine = connect(server.url)
    metadata.create_all(engine)
    ledger = Ledger(engine)
    settings = settings_for(tmp_path, [double.url])
    ledger.versions.ensure_base(settings.model.model_path)
    with (
        serving(create_app(settings, ledger, on_failure=lambda _: None)) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        eventually(lambda: http.get("/health/ready").status_code == 200)
        reply = [http.post(CHAT, json=HELLO).json()["id"] for _ in range(5)]
        server.stop()
        reply += [http.post(CHAT, json=HELLO).json()["id"] for _ in range(5)]
        assert http.post("/feedback", json={"msg_ids": reply, "reward": 1}).status_code == 200
        assert http.post("/commit").status_code == 503
        assert http.get("/health/ready").status_code == 200
        server.start()
        eventually(lambda: http.post("/commit").status_code == 200)
        assert ledger.reports.counts()[State.COMMITTED] == 10
        assert ledger.reports.imbalance() == []
    ledger.close()
    server.close()


def test_a_bug_in_a_periodic_task_is_counted_and_the_service_goes_on(tmp_path: Path, double: EngineDouble) -> None:
    class Broken(Reports):
        def imbalance(self) -> list[str]:
            raise KeyError("a bug")

    engine = connect(f"sqlite:///{tmp_path}/ledger.db")
    metadata.create_all(engine)
    ledger, failures = Ledger(engine), []
    ledger.reports = Broken(ledger.transactions)
    ledger.versions.ensure_base(tmp_path)
    with serving(create_app(settings_for(tmp_path, [double.url]), ledger, on_failure=failures.append)) as url:
        counted = 'tuneloop_background_failures_total{task="ledger_gauges"}'
        eventually(lambda: counted in httpx.get(url + "/metrics", timeout=60).text)
        assert httpx.get(url + "/health", timeout=60).status_code == 200
    assert failures == []
    ledger.close()
