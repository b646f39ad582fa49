"""The composition root of a worker: the app's lifespan opens and closes its services, and routes only call them."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import orjson
import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tuneloop.explorer.access.feedback_tokens import FeedbackTokens
from tuneloop.explorer.access.loopback import is_from_here
from tuneloop.explorer.background_tasks import OnFailure, Task, every, run_task
from tuneloop.explorer.bulk_work import LOOKUP_THREADS, BulkWork
from tuneloop.explorer.capture.control_client import ControlClient
from tuneloop.explorer.capture.recorder import Recorder, SpoolLimits
from tuneloop.explorer.capture.reply_id import ReplyIdSigner
from tuneloop.explorer.capture.spool import Spool
from tuneloop.explorer.dialects.conversations import Conversations
from tuneloop.explorer.dialects.dialect import (
    CHAT,
    MESSAGES,
    RESPONSES,
    TEXT,
    ChatDialect,
    Dialect,
    MessagesDialect,
    ResponsesDialect,
    TextDialect,
)
from tuneloop.explorer.dialects.responses_native import NativeResponsesDialect
from tuneloop.explorer.engines.admission import Admission
from tuneloop.explorer.engines.fleet import Engine, Fleet, PinParser
from tuneloop.explorer.feedback.bound import TokenRoute
from tuneloop.explorer.feedback.commit import CommitRoute
from tuneloop.explorer.feedback.routes import FeedbackRoutes
from tuneloop.explorer.feedback.traced_feedback import TracedFeedbackRoutes
from tuneloop.explorer.http import errors
from tuneloop.explorer.http.caller import EntryGate
from tuneloop.explorer.http.connections import ConnectionLimits, descriptor_limit, most_connections
from tuneloop.explorer.http.cors import CrossOrigin
from tuneloop.explorer.http.raw_request import FastRoute, RawRequest
from tuneloop.explorer.http.server import FastRoutes
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.proxy.proxy import Proxy
from tuneloop.explorer.proxy.shadow import Shadow
from tuneloop.explorer.proxy.traced_proxy import TracedProxy, close_at_end
from tuneloop.explorer.routes import (
    admin,
    keys,
    metrics_json,
    passthrough,
    responses,
    stored_completions,
    training_status,
)
from tuneloop.explorer.routes.metrics_json import TRINITY
from tuneloop.explorer.routes.responses import StoredResponses, stored_reader
from tuneloop.explorer.ui import page
from tuneloop.shared import VERSION
from tuneloop.shared.errors import RequestRefused, SpoolFull
from tuneloop.shared.job_marks import KEY, TRAFFIC_S, load_key, touch_traffic
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.engines import EngineSummary
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.opening import open_tracing

if TYPE_CHECKING:
    from tuneloop.shared.telemetry.tracing import Tracing

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services that the routes call."""

    proxy: Proxy
    dialects: Mapping[str, Dialect]
    responses: StoredResponses
    feedback: FeedbackRoutes
    commit: CommitRoute
    feedback_tokens: TokenRoute
    fleet: Fleet
    control_client: ControlClient
    limits: SpoolLimits
    spool: Spool
    recorder: Recorder
    #: Where callers take turns with what they read of the database, other than the few rows of a stored completion.
    reading: BulkWork


#: Opens the services, closed by the stack; also returns the tasks that must run beside the requests.
OpenServices = Callable[[AsyncExitStack], Awaitable[tuple[Services, list[Task]]]]


def create_app(
    settings: Settings, ledger: Ledger, *, gate: EntryGate, opening: OpenServices, on_failure: OnFailure
) -> FastRoutes:
    """The ASGI app over an up-to-date ledger, with fast routes for requests for replies, to whom `gate` lets in.

    `on_failure` is called when a task that must run has failed.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            services, tasks = await opening(stack)
            app.state.services = services
            stack.push_async_callback(services.recorder.close)
            stack.callback(services.reading.close)
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(run_task(task, on_failure)) for task in tasks]
                yield
                for each in running:
                    each.cancel()

    app = FastAPI(
        title="tuneloop",
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.stopping = asyncio.Event()
    errors.install_error_handlers(app)
    _add_routes(app)
    passthrough.add_routes(app, PinParser(settings), max_body_bytes=settings.explorer.max_body_bytes)
    stored_completions.add_routes(app, ledger.stored, default_model=settings.served_model_name)
    responses.add_routes(app)
    metrics_json.add_routes(app)
    admin.add_routes(app, settings, ledger)
    keys.add_routes(app, ledger.keys)
    training_status.add_routes(app, settings, ledger)
    page.add_routes(app, settings, ledger, gate)
    for path in (CHAT, TEXT, RESPONSES, MESSAGES):
        app.post(path)(_not_served_here)
    fast_routes = {("POST", path): _fast_route(app, path) for path in (CHAT, TEXT, RESPONSES, MESSAGES)}
    fast_routes["POST", TRINITY + CHAT] = fast_routes["POST", CHAT]
    cross_origin = CrossOrigin(settings.explorer.cors_allow_origins)
    return FastRoutes(app, fast_routes, _connection_limits(settings), gate, cross_origin)


def _connection_limits(settings: Settings) -> ConnectionLimits:
    explorer = settings.explorer
    return ConnectionLimits(
        max_connections=most_connections(explorer.max_connections, descriptor_limit()),
        max_held_bytes=explorer.max_held_bytes,
        head_timeout_s=explorer.head_timeout,
        body_timeout_s=min(explorer.body_timeout, explorer.request_timeout),
    )


async def _not_served_here() -> Response:
    """Refuse a request that comes with another method, or through another server."""
    raise RequestRefused(
        "this route is answered by `python -m tuneloop.explorer` only", status=501, code="not_served_here"
    )


def _fast_route(app: FastAPI, path: str) -> FastRoute:
    async def answer(raw: RawRequest) -> None:
        services: Services = app.state.services
        await services.proxy.answer(services.dialects[path], raw)

    return answer


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesOf = Annotated[Services, Depends(_services)]


def _add_routes(app: FastAPI) -> None:
    @app.post("/feedback")
    @app.post(f"{TRINITY}/feedback")
    async def feedback(request: Request, services: ServicesOf) -> Response:
        # Not JSONResponse: a hundred thousand outcomes would take it a second, during which streams stand still.
        return Response(orjson.dumps(await services.feedback.feedback(request)), media_type="application/json")

    @app.options("/feedback")
    async def preflight() -> Response:
        return Response(status_code=204)

    @app.post("/v1/feedback_tokens")
    async def feedback_token(request: Request, services: ServicesOf) -> Response:
        return JSONResponse(await services.feedback_tokens.create(request), headers={"cache-control": "no-store"})

    @app.post("/commit")
    @app.post(f"{TRINITY}/commit")
    async def commit(request: Request, services: ServicesOf) -> Response:
        return JSONResponse(await services.commit.commit(request))

    @app.get("/health")
    @app.get("/health/live")
    @app.get(f"{TRINITY}/health")
    async def live() -> Response:
        return JSONResponse({"status": "live"})

    @app.get("/health/ready")
    async def ready(request: Request, services: ServicesOf) -> Response:
        reason = _why_not_ready(services)
        status: dict[str, object] = {"status": "not_ready" if reason else "ready"}
        client, [own, _] = request.client.host if request.client else "", request.scope.get("server") or ("", 0)
        # Who has our own address is on this machine, too.
        if is_from_here("127.0.0.1" if client == own else client, request.headers.raw):
            status |= {"reason": reason, "engines": [_status_of(engine) for engine in services.fleet.engines]}
        return JSONResponse(status, 503 if reason else 200)

    @app.get("/ping")
    @app.post("/ping")
    async def ping(services: ServicesOf) -> Response:
        return Response(status_code=503 if _why_not_ready(services) else 200)


def _status_of(engine: Engine) -> dict[str, object]:
    status = EngineSummary(engine.number, engine.state.value, engine.version, engine.proof)
    return status._asdict()


def _why_not_ready(services: Services) -> str | None:
    if not services.fleet.ready:
        return "no engine is ready"
    try:
        services.limits.admit()
    except SpoolFull as error:
        return str(error)
    if (reason := services.limits.refusal) is not None:
        return f"the database refuses what is recorded, which waits in the spool: {reason}"
    return None


def open_spool(settings: Settings, stack: AsyncExitStack) -> Spool:
    """The spool that the routes write to, closed by `stack`."""
    spool = Spool.open(settings.spool_dir, sync=settings.explorer.durability == "fsync")
    stack.callback(spool.close)
    return spool


def _open_redactor(settings: Settings, key: bytes, metrics: Metrics) -> Redactor:
    found = metrics.redaction
    redactor = Redactor.open(settings, key, count=found.count_redacted, timed_out=found.count_timed_out)
    if redactor and not redactor.spells_ids:
        log.warning("token_ids_not_spelled", model=str(settings.model.model_path))
    return redactor


def _open_shadow(settings: Settings, fleet: Fleet, control_client: ControlClient, metrics: Metrics) -> Shadow:
    return Shadow(
        fleet,
        refusals=settings.monitor.drift.refusals_found,
        report=control_client.report_shadow_reply,
        metrics=metrics,
        timeout_s=settings.explorer.request_timeout,
    )


def _tell_traffic(settings: Settings, admission: Admission, metrics: Metrics) -> Task:
    """Keep the trainer told of whether requests are being answered."""

    async def turn() -> None:
        if admission.in_flight:
            touch_traffic(settings.job_dir)

    return every(TRAFFIC_S, turn, task="traffic", metrics=metrics)


def _route_makers(tracing: "Tracing | None") -> tuple[Callable[..., Proxy], Callable[..., FeedbackRoutes]]:
    """What makes the proxy and the feedback routes: those that send traces, if traces are wanted."""
    if tracing is None:
        return Proxy, FeedbackRoutes
    return functools.partial(TracedProxy, tracing), functools.partial(TracedFeedbackRoutes, tracing)


def _limit_spool(settings: Settings, ledger: Ledger, spool: Spool) -> SpoolLimits:
    return SpoolLimits(
        spool,
        max_bytes=settings.explorer.spool_max_bytes,
        max_age_s=settings.explorer.spool_max_age,
        check_database=ledger.recording.check_place,
    )


def open_services(
    settings: Settings, ledger: Ledger, *, spool: Spool, fleet: Fleet, metrics: Metrics, control_client: ControlClient
) -> tuple[Services, list[Task]]:
    """Open the services that the routes call, and the tasks that they need."""
    key, limits = load_key(settings.job_dir / KEY), _limit_spool(settings, ledger, spool)
    recorder, signer = Recorder(spool, limits, metrics, _open_redactor(settings, key, metrics)), ReplyIdSigner(key)
    reading = BulkWork(threads=LOOKUP_THREADS)
    conversations = Conversations(signer, reading, control_client=control_client, reports=ledger.reports)
    shadow = _open_shadow(settings, fleet, control_client, metrics)
    tracing = open_tracing(settings, "explorer")
    make_proxy, make_feedback = _route_makers(tracing)
    proxy = make_proxy(settings, fleet, signer=signer, recorder=recorder, metrics=metrics, shadow=shadow.offer)
    metrics.in_flight.set_function(lambda: proxy.admission.in_flight)
    metrics.waiting.set_function(lambda: proxy.admission.waiting)
    defaults = {"temperature": settings.model.temperature, "max_output_tokens": settings.model.max_response_tokens}
    responses = ResponsesDialect(
        conversations.read,
        defaults=defaults,
        find_context_length=functools.partial(passthrough.context_length, fleet),
        native=NativeResponsesDialect(conversations.read, defaults=defaults),
    )
    stored_responses = StoredResponses(
        signer=signer,
        read=stored_reader(ledger.stored, reading),
        control_client=control_client,
        fleet=fleet,
        rebuild=responses.rebuild,
        default_model=settings.served_model_name,
    )
    services = Services(
        proxy=proxy,
        dialects={each.path: each for each in (ChatDialect(), TextDialect(), responses, MessagesDialect())},
        responses=stored_responses,
        feedback=make_feedback(
            signer=signer,
            recorder=recorder,
            control_client=control_client,
            ledger=ledger,
            metrics=metrics,
            settings=settings,
        ),
        commit=CommitRoute(recorder=recorder, control_client=control_client, recording=ledger.recording),
        feedback_tokens=TokenRoute(signer, FeedbackTokens(key)),
        recorder=recorder,
        reading=reading,
        fleet=fleet,
        control_client=control_client,
        limits=limits,
        spool=spool,
    )
    watching = proxy.parser.capture.watch(ledger.alarms, metrics)
    tasks = [limits.run(metrics), proxy.background.run(), shadow.run(), watching]
    if settings.trainer.yield_to_traffic:
        tasks.append(_tell_traffic(settings, proxy.admission, metrics))
    return services, tasks if tracing is None else [*tasks, close_at_end(tracing)]
