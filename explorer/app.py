"""Puts the explorer together: what it needs is opened and closed by the app's lifespan, and routes only hand over."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from explorer import envelope, vllm_api
from explorer.chat import PATH, Chat
from explorer.engine_process import EngineProcess
from explorer.feedback import FeedbackDesk
from explorer.fleet import Engine, EngineState, Fleet
from explorer.flusher import Flusher
from explorer.metrics import Metrics
from explorer.msg_id import Mint, key_path, load_key
from explorer.recorder import Recorder
from explorer.reload import Reloader
from explorer.spool import Spool
from explorer.supervisor import keep_running, stay_attached
from explorer.upstream import open_session, reaching_an_engine
from explorer.watch import Watch
from shared import VERSION
from shared.config import Settings
from shared.errors import SpoolFull, TuneloopError
from shared.ledger import Ledger

log = structlog.get_logger()

#: How often the gauges are brought up to date, at most.
_WATCH_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Road:
    """What the routes hand over to."""

    chat: Chat
    desk: FeedbackDesk
    fleet: Fleet
    metrics: Metrics
    spool: Spool


def create_app(settings: Settings, ledger: Ledger, *, on_failure: Callable[[TuneloopError], None]) -> FastAPI:
    """The explorer as an ASGI app over an up-to-date ledger.

    `on_failure` is told when something that must run cannot, such as an engine that dies at start.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.road, tasks = await _open(settings, ledger, stack, on_failure)
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(_report(task, on_failure)) for task in tasks]
                yield
                for each in running:
                    each.cancel()

    app = FastAPI(title="tuneloop", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    envelope.install(app)
    _add_routes(app)
    return app


async def _report(task: Coroutine[Any, Any, None], on_failure: Callable[[TuneloopError], None]) -> None:
    try:
        await task
    except TuneloopError as error:
        on_failure(error)
    except Exception as error:
        # A bug. Its task is gone, so go down and be started again rather than go on without it.
        log.exception("task_failed")
        on_failure(TuneloopError(f"an internal error: {error!r}"))


def _road(request: Request) -> Road:
    road: Road = request.app.state.road
    return road


RoadOf = Annotated[Road, Depends(_road)]


def _add_routes(app: FastAPI) -> None:
    @app.post(PATH)
    async def chat(request: Request, road: RoadOf) -> Response:
        return await road.chat.answer(request)

    @app.post("/feedback")
    async def feedback(request: Request, road: RoadOf) -> Response:
        return JSONResponse(await road.desk.feedback(request))

    @app.post("/commit")
    async def commit(request: Request, road: RoadOf) -> Response:
        return JSONResponse(await road.desk.commit(request))

    @app.get("/v1/models")
    async def models(road: RoadOf) -> Response:
        async with road.fleet.engine() as engine:
            with reaching_an_engine():
                async with engine.session.get("/v1/models") as reply:
                    return Response(await reply.read(), reply.status, media_type="application/json")

    @app.get("/health")
    @app.get("/health/live")
    async def live() -> Response:
        return JSONResponse({"status": "live"})

    @app.get("/health/ready")
    async def ready(road: RoadOf) -> Response:
        reason = _why_not_ready(road)
        return JSONResponse({"status": "not_ready" if reason else "ready", "reason": reason}, 503 if reason else 200)

    @app.get("/metrics")
    async def metrics(road: RoadOf) -> Response:
        road.metrics.spool_bytes.set(road.spool.backlog_bytes())
        for state in EngineState:
            road.metrics.engines.labels(state.value).set(sum(each.state is state for each in road.fleet.engines))
        return Response(generate_latest(road.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _why_not_ready(road: Road) -> str | None:
    if not road.fleet.ready:
        return "no engine is ready"
    try:
        road.spool.admit()
    except SpoolFull as error:
        return str(error)
    return None


async def _open(
    settings: Settings, ledger: Ledger, stack: AsyncExitStack, on_failure: Callable[[TuneloopError], None]
) -> tuple[Road, list[Coroutine[Any, Any, None]]]:
    """Everything the app consists of, closed by `stack`, and what must run beside the requests."""
    explorer, metrics = settings.explorer, Metrics()
    spool = Spool.open(settings.spool_dir, max_bytes=explorer.spool_max_bytes, sync=explorer.durability == "fsync")
    stack.callback(spool.close)
    flusher = Flusher(spool, ledger, quarantined=metrics.quarantined.inc, failed=on_failure)
    flusher.start()
    stack.push_async_callback(asyncio.to_thread, flusher.stop)
    watch = Watch(
        ledger,
        metrics,
        folder=settings.tensorboard_dir / "explorer",
        interval_s=min(explorer.service_status_check_interval, _WATCH_S),
    )
    stack.callback(watch.close)
    fleet, engines_run = await _open_fleet(settings, ledger, stack)
    mint, recorder = Mint(load_key(key_path(settings))), Recorder(spool, metrics)
    road = Road(
        chat=Chat(settings, fleet, mint=mint, recorder=recorder, metrics=metrics),
        desk=FeedbackDesk(mint=mint, recorder=recorder, flusher=flusher, ledger=ledger),
        fleet=fleet,
        metrics=metrics,
        spool=spool,
    )
    reloader = Reloader(settings, fleet, ledger=ledger, metrics=metrics)
    return road, [watch.run(), reloader.run(), *engines_run]


async def _open_fleet(
    settings: Settings, ledger: Ledger, stack: AsyncExitStack
) -> tuple[Fleet, list[Coroutine[Any, Any, None]]]:
    rollout = settings.explorer.rollout_model
    sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tuneloop-")))
    places: list[tuple[str | None, Path | None]] = [(url, None) for url in rollout.engine_urls]
    places = places or [(None, sockets / f"{number}.sock") for number in range(rollout.engine_num)]
    engines = []
    for number, (url, socket) in enumerate(places):
        session = open_session(
            url=url,
            socket=str(socket) if socket else None,
            key=rollout.engine_key,
            timeout_s=settings.explorer.request_timeout,
        )
        await stack.enter_async_context(session)
        tolerance = vllm_api.TOLERANCE[rollout.dtype]
        control = vllm_api.Control(session, model_name=settings.served_model_name, tolerance=tolerance)
        engines.append(Engine(number, session, control))
    fleet, base = Fleet(engines, patience_s=settings.explorer.request_timeout), settings.model.model_path.absolute()
    runs = [
        stay_attached(engine, fleet=fleet, ledger=ledger)
        if socket is None
        else keep_running(engine, EngineProcess(settings, engine, socket=socket), fleet=fleet, ledger=ledger, base=base)
        for engine, (_, socket) in zip(engines, places, strict=True)
    ]
    return fleet, runs
