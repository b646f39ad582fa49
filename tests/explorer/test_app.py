"""What only the parts put together by hand, or another database, can show."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from uvicorn.server import ServerState

from tests.doubles import postgres
from tests.doubles.engine import CHAT, EngineDouble
from tests.doubles.serving import serving
from tests.explorer.running import HELLO, eventually, explorer_running, settings_for
from tests.explorer.whole import create_app
from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.dialects.dialect import ChatDialect
from tuneloop.explorer.edge import Edge, Http11
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.engines.vllm import EngineControl, open_session
from tuneloop.explorer.metrics import VERSIONS_SHOWN, Metrics, ProcessTotals, process_samples
from tuneloop.explorer.proxy.proxy import Proxy
from tuneloop.explorer.recorder import OutboxLimits, Recorder
from tuneloop.explorer.routes.passthrough import remembered_context_length
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.runner.outbox import Outbox
from tuneloop.shared.errors import EnvironmentRefused, LedgerUnavailable
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


# The one loop of all periodic tasks: what passes is logged twice, a bug is counted, and either way it goes on.


def turns(*outcomes: Exception | float | None) -> tuple[list[float], Callable[[], Awaitable[float | None]]]:
    """A turn that ends in these ways, one after the other, and then waits; and when each began."""
    began: list[float] = []
    left = list(outcomes)

    async def turn() -> float | None:
        began.append(asyncio.get_running_loop().time())
        if not left:
            await asyncio.Event().wait()
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return began, turn


async def run(*outcomes: Exception | float | None, seconds: float = 0.0) -> tuple[list[float], Metrics]:
    """Let the loop come to the turn after these, then cancel it."""
    metrics = Metrics()
    began, turn = turns(*outcomes)
    running = asyncio.ensure_future(every(seconds, turn, task="retention", metrics=metrics))
    async with asyncio.timeout(60):
        while len(began) <= len(outcomes) and not running.done():  # noqa: ASYNC110 - the loop itself has no event
            await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return began, metrics


def failures(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("tuneloop_background_failures_total", {"task": "retention"})


async def test_a_bug_is_logged_with_its_traceback_and_counted_and_the_next_turn_comes() -> None:
    with capture_logs() as logs:
        _, metrics = await run(RuntimeError("a bug"), KeyError("another"), None)
    assert failures(metrics) == 2
    assert [(each["event"], each["task"], each["exc_info"]) for each in logs] == [
        ("background_task_failed", "retention", True)
    ] * 2


async def test_a_database_that_is_away_is_logged_when_it_begins_and_when_it_is_over() -> None:
    away = LedgerUnavailable("no answer")
    with capture_logs() as logs:
        _, metrics = await run(None, away, away, away, None, None, away)
    assert [each["event"] for each in logs] == ["database_away", "database_back", "database_away"]
    assert failures(metrics) == 0


async def test_a_turn_may_say_when_the_next_one_is_due() -> None:
    began, _ = await run(0.0, 0.2, None, seconds=0.05)
    pauses = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert pauses[1] >= 0.19
    assert pauses[2] >= 0.04


async def test_what_no_turn_cures_ends_the_task() -> None:
    _, turn = turns(EnvironmentRefused("another experiment's database"))
    with pytest.raises(EnvironmentRefused):
        await every(0.0, turn, task="retention", metrics=Metrics())


# Metrics of several processes, added up.


def collected(totals: ProcessTotals) -> dict[tuple[str, str], float]:
    """What /metrics says, by name and labels."""
    text = generate_latest(totals).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, ",".join(sample.labels.values())): sample.value for sample in samples}


def worker(requests: int, *, version: int = 0, in_flight: int = 0) -> CollectorRegistry:
    metrics = Metrics()
    for _ in range(requests):
        metrics.count_request("/chat", 200, version, 0.02)
    metrics.in_flight.set(in_flight)
    return metrics.registry


def test_what_workers_count_is_added_up() -> None:
    own = Metrics()
    own.outbox_refused.inc()
    totals = ProcessTotals(own.registry)
    for requests in (2, 3):  # its latest count takes the place of the one before
        totals.update(0, process_samples(worker(requests, in_flight=1)))
    totals.update(1, process_samples(worker(4, version=1, in_flight=2)))
    found = collected(totals)
    assert found["tuneloop_requests_total", "/chat,200,0"] == 3
    assert found["tuneloop_requests_total", "/chat,200,1"] == 4
    assert found["tuneloop_request_seconds_count", "/chat"] == 7
    assert found["tuneloop_request_seconds_bucket", "/chat,0.01"] == 0
    assert found["tuneloop_request_seconds_bucket", "/chat,0.025"] == 7
    assert found["tuneloop_requests_in_flight", ""] == 3
    assert found["tuneloop_outbox_refused_total", ""] == 1


def test_gauges_of_the_service_are_the_control_processs_alone() -> None:
    own, other = Metrics(), Metrics()
    own.version_served.set(7)
    other.version_served.set(3)
    totals = ProcessTotals(own.registry)
    totals.update(0, process_samples(other.registry))
    assert collected(totals)["tuneloop_version_served", ""] == 7


def test_no_counter_falls_when_a_worker_dies_and_its_gauges_go() -> None:
    totals = ProcessTotals(Metrics().registry)
    for serial in range(3):
        totals.update(serial, process_samples(worker(2, in_flight=4)))
        totals.retire(serial)
    totals.retire(3)  # it died before it counted anything
    totals.update(4, process_samples(worker(1, in_flight=1)))
    found = collected(totals)
    assert found["tuneloop_requests_total", "/chat,200,0"] == 7
    assert found["tuneloop_requests_in_flight", ""] == 1


def test_names_and_labels_are_those_of_one_process() -> None:
    metrics = Metrics()
    metrics.count_request("/chat", 200, 0, 0.02)
    alone = {(name, labels) for name, labels in collected(ProcessTotals(metrics.registry))}
    totals = ProcessTotals(Metrics().registry)
    totals.update(0, process_samples(worker(1)))
    assert set(collected(totals)) == alone


def test_of_an_engine_that_was_ended_nothing_is_said_any_more() -> None:
    metrics = Metrics()
    for gauge in (metrics.last_good_probe, metrics.has_fingerprint):
        for engine in ("0", "1"):
            gauge.labels(engine).set(1)
    for _ in range(2):
        metrics.forget_engine(1)
    found = collected(ProcessTotals(metrics.registry))
    for name in ("tuneloop_engine_last_good_probe_timestamp_seconds", "tuneloop_engine_fingerprint"):
        assert [engine for each, engine in found if each == name] == ["0"]


def versions_in(totals: ProcessTotals) -> set[str]:
    """The versions that /metrics tells the requests of."""
    return {labels.split(",")[2] for name, labels in collected(totals) if name == "tuneloop_requests_total"}


def test_of_many_versions_those_counted_last_have_series() -> None:
    metrics = Metrics()
    for version in range(1, 3 * VERSIONS_SHOWN):
        metrics.count_request("/chat", 200, 0, 0.02)  # the champion for long
        metrics.count_request("/chat", 200, version, 0.02)
        metrics.count_reply(version, "whole")
    found = collected(ProcessTotals(metrics.registry))
    newest = {str(version) for version in range(3 * VERSIONS_SHOWN - VERSIONS_SHOWN + 1, 3 * VERSIONS_SHOWN)}
    assert versions_in(ProcessTotals(metrics.registry)) == {"0", *newest}
    assert found["tuneloop_requests_total", "/chat,200,0"] == 3 * VERSIONS_SHOWN - 1
    assert len([name for name, _ in found if name == "tuneloop_replies_total"]) == VERSIONS_SHOWN
    assert found["tuneloop_request_seconds_count", "/chat"] == 2 * (3 * VERSIONS_SHOWN - 1)


def test_no_version_falls_while_one_process_tells_of_it_and_another_no_more() -> None:
    forgetful, other, totals = Metrics(), Metrics(), ProcessTotals(Metrics().registry)
    for metrics in (forgetful, other):
        metrics.count_request("/chat", 200, 0, 0.02)
        totals.update(id(metrics), process_samples(metrics.registry))
    for version in (*range(1, 1 + VERSIONS_SHOWN), 0):
        forgetful.count_request("/chat", 200, version, 0.02)
        totals.update(id(forgetful), process_samples(forgetful.registry))
        assert collected(totals)["tuneloop_requests_total", "/chat,200,0"] == (2 if version else 3)


def test_versions_that_no_process_tells_of_are_forgotten_in_the_end() -> None:
    metrics, totals = Metrics(), ProcessTotals(Metrics().registry)
    for version in range(3 * VERSIONS_SHOWN):
        metrics.count_request("/chat", 200, version, 0.02)
        totals.update(0, process_samples(metrics.registry))
        assert len(versions_in(totals)) <= 2 * VERSIONS_SHOWN
    assert versions_in(totals) == {str(version) for version in range(VERSIONS_SHOWN, 3 * VERSIONS_SHOWN)}
