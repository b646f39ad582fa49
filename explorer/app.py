"""Builds the ASGI app of a worker: the lifespan opens and closes the services that the routes call."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tuneloop.explorer.arrivals import Arrivals
from tuneloop.explorer.auth import TRINITY, CrossOrigin, Gatekeeper, is_from_here
from tuneloop.explorer.background_tasks import OnFailure, Task, every, run_task
from tuneloop.explorer.channel import ControlClient
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
from tuneloop.explorer.edge import Edge, SamplingRoute
from tuneloop.explorer.engines.fleet import Fleet, PinParser
from tuneloop.explorer.feedback import routes as feedback
from tuneloop.explorer.feedback import score_routes
from tuneloop.explorer.feedback.routes import CommitRoute, FeedbackRoutes, TokenRoute
from tuneloop.explorer.feedback.score_routes import ScoreRoutes
from tuneloop.explorer.http import errors
from tuneloop.explorer.limits import BodyLimits, ConnectionLimits, most_connections
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.proxy.proxy import Proxy
from tuneloop.explorer.recorder import FILE_BYTES, OutboxLimits, Recorder
from tuneloop.explorer.routes import (
    admin,
    files,
    fine_tuning,
    passthrough,
    stored_completions,
    training_status,
)
from tuneloop.explorer.tokens import TokenSigner
from tuneloop.explorer.traces import Traces
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.explorer.ui import page
from tuneloop.runner.outbox import Outbox
from tuneloop.shared import VERSION, engine_flags
from tuneloop.shared.errors import StorageFull
from tuneloop.shared.job_marks import KEY, TRAFFIC_S, load_key, touch_traffic
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.diagnosis import why_not_ready
from tuneloop.shared.operations.engines import EngineSummary
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.opening import open_tracing

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    proxy: Proxy
    dialects: Mapping[str, Dialect]
    feedback: FeedbackRoutes
    scores: ScoreRoutes
    commit: CommitRoute
    feedback_tokens: TokenRoute
    fleet: Fleet
    control_client: ControlClient
    limits: OutboxLimits
    outbox: Outbox
    recorder: Recorder
    arrivals: Arrivals

    def drain_status(self) -> OutboxStatus:
        return self.limits.status


#: Opens the services, closed by the stack; also returns the tasks that must run beside the requests.
OpenServices = Callable[[AsyncExitStack], Awaitable[tuple[Services, list[Task]]]]


def create_app(
    settings: Settings, ledger: Ledger, *, gate: Gatekeeper, opening: OpenServices, on_failure: OnFailure
) -> Edge:
    """The ASGI app over an up-to-date ledger. `on_failure` is called when a task that must run has failed."""

    routes: dict[str, SamplingRoute] = {}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            services, tasks = await opening(stack)
            app.state.services = services
            for path, dialect in services.dialects.items():
                routes[path] = functools.partial(services.proxy.answer, dialect)
            routes[TRINITY + CHAT] = routes[CHAT]
            stack.push_async_callback(services.recorder.close)
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
    errors.install_error_handlers(app)
    feedback.add_routes(app)
    score_routes.add_routes(app)
    _add_routes(app)
    passthrough.add_routes(app, PinParser(settings), max_body_bytes=settings.explorer.max_body_bytes)
    stored_completions.add_routes(app, settings, ledger)
    stored_completions.add_responses(app, settings, ledger)
    admin.add_routes(app, settings, ledger)
    admin.add_policies(app, settings, ledger)
    admin.add_keys(app, ledger)
    fine_tuning.add_routes(app, settings, ledger)
    fine_tuning.add_graders(app, timeout_s=settings.explorer.request_timeout)
    files.add_routes(app, settings, ledger)
    training_status.add_routes(app, settings, ledger)
    training_status.add_metrics(app)
    page.add_routes(app, settings, ledger, gate)
    for path in (CHAT, TEXT, RESPONSES, MESSAGES):
        app.post(path)(_never_called)

    explorer = settings.explorer
    return Edge(
        app,
        routes,
        limits=BodyLimits(explorer.max_held_bytes, min(explorer.body_timeout, explorer.request_timeout)),
        connections=ConnectionLimits(most_connections(explorer.max_connections), explorer.head_timeout),
        gate=gate,
        cross_origin=CrossOrigin(explorer.cors_allow_origins, inference=explorer.cors_inference_origins),
    )


async def _never_called() -> None:
    """Lets FastAPI refuse other methods on a path that the edge answers."""


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesOf = Annotated[Services, Depends(_services)]


def _add_routes(app: FastAPI) -> None:
    # HEAD too: container health checks such as `wget --spider` send it.
    probe = functools.partial(app.api_route, methods=["GET", "HEAD"])

    @probe("/health")
    @probe("/health/live")
    @probe("/api/hello")  # Claude Code checks the connection here and reads only the status
    @probe(f"{TRINITY}/health")
    async def live() -> Response:
        return JSONResponse({"status": "live"})

    @probe("/health/ready")
    async def ready(request: Request, services: ServicesOf) -> Response:
        reason, stops = _why_not_ready(services), services.control_client.stops()
        status: dict[str, object] = {"status": "not_ready" if reason else "ready"}
        client, [own, _] = request.client.host if request.client else "", request.scope.get("server") or ("", 0)
        # A client with this machine's own address runs on this machine.
        if is_from_here("127.0.0.1" if client == own else client, request.headers.raw):
            engines = [
                EngineSummary(each.number, each.state.value, each.version, each.proof, each.packs)._asdict()
                for each in services.fleet.engines
            ]
            status |= {"reason": reason, "engines": engines, "stops": [stop._asdict() for stop in stops]}
        return JSONResponse(status, 503 if reason else 200)

    @app.get("/ping")
    @app.post("/ping")
    async def ping(services: ServicesOf) -> Response:
        return Response(status_code=503 if _why_not_ready(services) else 200)


def _why_not_ready(services: Services) -> str | None:
    storage = None
    try:
        services.limits.admit()
    except StorageFull as error:
        storage = str(error)
    return why_not_ready(
        services.control_client.stops(),
        has_engine=services.fleet.ready,
        storage=storage,
    )


def open_outbox(settings: Settings, stack: AsyncExitStack) -> Outbox:
    """Open the outbox that the routes write to; `stack` closes it. Raises OSError."""
    outbox = Outbox(settings.outbox_dir, FILE_BYTES)
    stack.callback(outbox.close)
    return outbox


def _anthropic(settings: Settings) -> MessagesDialect:
    rollout = settings.explorer.rollout_model
    thinks = engine_flags.thinks(rollout.engine_args, rollout.reasoning_parser)
    return MessagesDialect(thinks=thinks or bool(rollout.engine_urls))


def open_services(
    settings: Settings, ledger: Ledger, *, outbox: Outbox, fleet: Fleet, metrics: Metrics, control_client: ControlClient
) -> tuple[Services, list[Task]]:
    explorer, key = settings.explorer, load_key(settings.job_dir / KEY)
    most, oldest, check = explorer.outbox_max_bytes, explorer.outbox_max_age, ledger.recording.check_place
    limits = OutboxLimits(outbox, max_bytes=most, max_age_s=oldest, check_database=check)
    redactor = Redactor.open(
        settings,
        key,
        count=lambda kind: metrics.redacted.labels(kind).inc(),
        timed_out=lambda pattern: metrics.patterns_timed_out.labels(pattern).inc(),
    )
    if redactor and not redactor.spells_ids:
        log.warning("token_ids_not_spelled", model=str(settings.model.model_path))
    recorder = Recorder(outbox, limits, metrics, redactor, wake_drain=control_client.wake_drain)
    signer = ReplyIdSigner(key)
    arrivals = Arrivals(signer, ledger.explorers)
    conversations = Conversations(signer, control_client.wait_until_taken, ledger.reports, arrivals)
    tracing = open_tracing(settings, "explorer")
    traces = None if tracing is None else Traces(tracing, recorder.name_as_stored)
    find_context_length = passthrough.remembered_context_length(fleet)
    proxy = Proxy(
        settings,
        fleet,
        signer=signer,
        recorder=recorder,
        metrics=metrics,
        find_context_length=find_context_length,
        traces=traces,
    )
    metrics.in_flight.set_function(lambda: proxy.admission.in_flight)
    metrics.waiting.set_function(lambda: proxy.admission.waiting)
    defaults = {"temperature": settings.model.temperature, "max_output_tokens": settings.model.max_response_tokens}
    responses = ResponsesDialect(
        conversations.read,
        defaults=defaults,
        find_context_length=find_context_length,
    )
    feedback_routes = FeedbackRoutes(
        signer=signer,
        recorder=recorder,
        control_client=control_client,
        metrics=metrics,
        settings=settings,
        traces=traces,
    )
    services = Services(
        proxy=proxy,
        dialects={each.path: each for each in (ChatDialect(), TextDialect(), responses, _anthropic(settings))},
        feedback=feedback_routes,
        scores=ScoreRoutes(feedback_routes, ledger, settings),
        commit=CommitRoute(
            recorder=recorder, control_client=control_client, recording=ledger.recording, job_dir=settings.job_dir
        ),
        feedback_tokens=TokenRoute(signer, TokenSigner(key)),
        recorder=recorder,
        arrivals=arrivals,
        fleet=fleet,
        control_client=control_client,
        limits=limits,
        outbox=outbox,
    )
    tasks = [limits.run(metrics), proxy.parser.capture.watch(ledger.alarms, metrics)]

    async def tell_traffic() -> None:
        if proxy.admission.in_flight:
            touch_traffic(settings.job_dir)

    if settings.trainer.yield_to_traffic:
        tasks.append(every(TRAFFIC_S, tell_traffic, task="traffic", metrics=metrics))
    return services, tasks if traces is None else [*tasks, traces.run()]
