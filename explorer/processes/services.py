"""What runs beside the requests, once for the whole service: engines and their weights, the database, the gauges."""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import getfqdn
from typing import Any, NamedTuple, Protocol

import structlog
from prometheus_client import generate_latest

from tuneloop.explorer.arrivals import Arrivals
from tuneloop.explorer.background_tasks import OnFailure, Task, every
from tuneloop.explorer.channel import WorkerMovement
from tuneloop.explorer.dialects.conversations import Conversations
from tuneloop.explorer.drain import Drain
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet, FleetReplicas
from tuneloop.explorer.engines.process import EngineProcess
from tuneloop.explorer.engines.vllm import control_of
from tuneloop.explorer.feedback.judge import JudgeLoop
from tuneloop.explorer.jobs import LineChecks, ReinforcementJobs
from tuneloop.explorer.limits import descriptors_left
from tuneloop.explorer.metrics import Metrics, ProcessTotals
from tuneloop.explorer.processes.commit_timer import CommitTimer
from tuneloop.explorer.processes.engine_supervisor import (
    Attachment,
    Champions,
    EngineSupervisor,
    FleetTrial,
)
from tuneloop.explorer.processes.key_watch import KeyWatch, require_keys
from tuneloop.explorer.processes.ledger_gauges import LedgerGauges
from tuneloop.explorer.recorder import FILE_BYTES
from tuneloop.explorer.routes.files import sweep_files
from tuneloop.explorer.tokens import FeedbackClaims
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.explorer.versions.attestation import Attestation
from tuneloop.explorer.versions.evaluation import CandidateEvaluation
from tuneloop.explorer.versions.loading import Verifier, servable_champion
from tuneloop.explorer.versions.policy_serving import PolicyServing
from tuneloop.explorer.versions.reload import Reloader
from tuneloop.explorer.versions.trial import CanaryController
from tuneloop.runner.outbox import Outbox
from tuneloop.shared import VERSION
from tuneloop.shared.errors import LedgerUnavailable
from tuneloop.shared.experience import VersionAction, steady_clock
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.facts import EngineFacts, ExplorerFacts, Standstill
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.feedback import FeedbackResults
from tuneloop.shared.ledger.recording.retention import PURGEABLE, Person, Retention, bounds_of, bounds_of_tenants
from tuneloop.shared.ledger.versions.versions import VersionEvent
from tuneloop.shared.logging import LOG
from tuneloop.shared.operations.diagnosis import Code, find_stops
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import reveal
from tuneloop.shared.telemetry.opening import open_tracing
from tuneloop.shared.telemetry.spans import FinishedSpan, new_span, span_of_version

#: Types of models whose head is their embeddings unless their configuration says otherwise.
_TIED_UNLESS_SAID = ("gemma", "cohere")

#: How often the database records that this explorer runs, at most.
_SEEN_S = 5.0

#: How often the gauges are brought up to date, at most.
_WATCH_S = 10.0


class Address(NamedTuple):
    url: str | None
    socket: str | None


class WorkerReplicas(FleetReplicas, Protocol):
    """The workers, as the drain's thread reports to them; `outbox_status` and `database_away` are its last report."""

    outbox_status: OutboxStatus
    database_away: bool

    @property
    def movements(self) -> Sequence[WorkerMovement]:
        """Of the parts that a worker asks, as each reported last."""

    @property
    def url(self) -> str:
        """Where programs of this machine reach the workers."""

    def tell_results(self, owner: str, results: FeedbackResults) -> None:
        """Let the worker that took feedback know what became of it."""

    def tell_outbox(self, status: OutboxStatus, away: bool) -> None:
        """Let all know how much waits for the database."""

    def begin_new_files(self) -> None:
        """Have all let their outbox files go."""


_LOOK_S = 1.0

#: The states of an engine that answers, or will in a moment.
_ANSWERING = (EngineState.READY, EngineState.RELOADING)


class StandstillMonitor:
    def __init__(self, fleet: Fleet, drain: Drain, metrics: Metrics, workers: WorkerReplicas) -> None:
        self._fleet, self._drain, self._metrics, self._workers = fleet, drain, metrics, workers
        self.judge_s: Callable[[], float] = lambda: 0.0
        self._shown: set[str] = set()
        self._stops: tuple[Standstill, ...] = ()
        LOG.count_dropped = metrics.log_dropped.inc

    def current(self) -> tuple[Standstill, ...]:
        return self._stops

    def outbox(self) -> OutboxStatus:
        return self._workers.outbox_status

    async def run(self) -> None:
        await every(_LOOK_S, self.look, task="stops", metrics=self._metrics)

    async def look(self) -> None:
        seen, engines = self._workers.movements, []
        answering = [engine for engine in self._fleet.engines if engine.state in _ANSWERING]
        await asyncio.gather(*(engine.look([each.quiet[engine.number] for each in seen]) for engine in answering))
        for engine in answering:
            still_s = engine.movement.still_s
            engines.append(EngineFacts(engine.number, engine.state is EngineState.RELOADING, still_s))
        facts = ExplorerFacts(
            engines=tuple(engines),
            database_s=time.monotonic() - self._drain.moved_at,
            append_s=max((each.append_s for each in seen), default=0.0),
            judge_s=self.judge_s(),
            descriptors=min([descriptors_left(), *(each.descriptors for each in seen)]),
            refusal=self.outbox().refusal,
        )
        self._stops = find_stops(facts)
        codes = {stop.code for stop in self._stops}
        self._shown |= codes
        for code in self._shown:
            self._metrics.alarm.labels(code).set(code in codes)
        if replies := [each.reply_s for each in seen if each.reply_s is not None]:
            self._metrics.last_reply.set(time.time() - min(replies))


log = structlog.get_logger()

#: How often the settings' retention is applied.
PURGE_S = 3600.0


class RetentionLoop:
    def __init__(
        self,
        settings: Settings,
        retention: Retention,
        forget_files: Callable[[], None],
        *,
        metrics: Metrics,
        interval_s: float,
    ) -> None:
        self._bounds, self._of_tenants = bounds_of(settings.retention), bounds_of_tenants(settings)
        self._retention, self._forget_files, self._metrics = retention, forget_files, metrics
        self._purged = {state: metrics.purged.labels(state.value) for state in PURGEABLE}
        self._interval_s = interval_s
        self._purge_at = 0.0
        self._erased: dict[Person, float] = {}

    async def run(self) -> None:
        await every(self._interval_s, self.look, task="retention", metrics=self._metrics)

    async def look(self) -> None:
        """Forget what is to be forgotten by now. Raises LedgerUnavailable."""
        erased = await asyncio.to_thread(self._retention.erasures)
        if erased != self._erased:
            self._forget_files()
        self._erased = erased
        if (self._bounds or self._of_tenants) and time.monotonic() >= self._purge_at:
            await asyncio.to_thread(self._purge)
            self._purge_at = time.monotonic() + PURGE_S

    def _purge(self) -> None:
        for state, count in self._retention.purge(self._bounds, of_tenants=self._of_tenants).experiences.items():
            self._purged[state].inc(count)
            if count:
                log.info("experiences_purged", state=state.value, count=count)


#: Actions that a person or a rule decided on. What follows from one of them for other versions, such as that they
#: retire, is in the table only.
DECISIONS = (
    VersionAction.CANARY,
    VersionAction.PROMOTED,
    VersionAction.ROLLED_BACK,
    VersionAction.REJECTED,
    VersionAction.PINNED,
    VersionAction.UNPINNED,
)

_ANNOUNCED = "announced"

#: Those after which a version is not served although an earlier decision allowed it.
_AGAINST = frozenset({VersionAction.ROLLED_BACK, VersionAction.REJECTED})


class VersionLog:
    """Follows the decisions in `version_events`; the explorer that first notes one in the ledger announces it."""

    def __init__(
        self,
        ledger: Ledger,
        metrics: Metrics,
        *,
        interval_s: float,
    ) -> None:
        #: Also called with each decision that is logged.
        self.tell: Callable[[VersionEvent], None] = lambda event: None
        self._versions, self._explorers = ledger.versions, ledger.explorers
        self._metrics = metrics
        self._interval_s = interval_s
        self._seen: int | None = None
        self._champion = 0

    async def run(self) -> None:
        update = partial(asyncio.to_thread, self.update)
        await every(self._interval_s, update, task="version_log", metrics=self._metrics)

    def update(self) -> None:
        if self._seen is None:
            told = self._explorers.counts(_ANNOUNCED).get("", self._versions.last_event(DECISIONS))
            self._seen = int(told)
            self._explorers.advance(_ANNOUNCED, self._seen)
            promoted = self._versions.events_since(0, (VersionAction.PROMOTED,))
            self._champion = next((each.version for each in reversed(promoted) if each.id <= self._seen), 0)
        for event in self._versions.events_since(self._seen, DECISIONS):
            before = self._explorers.advance(_ANNOUNCED, event.id)
            self._seen = event.id
            self._tell(event, anew=before is None or event.id > before)

    def _tell(self, event: VersionEvent, *, anew: bool) -> None:
        if anew:
            fields: dict[str, Any] = {"version": event.version, "from_version": self._champion}
            say = log.warning if event.action in _AGAINST else log.info
            say(f"version_{event.action}", **fields, by=event.actor, reason=event.reason or "", event_id=event.id)
            self._metrics.version_decisions.labels(event.action.value, event.actor.partition(":")[0]).inc()
            self.tell(event)
        if event.action is VersionAction.PROMOTED:
            self._champion = event.version


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlServices:
    fleet: Fleet
    addresses: list[Address]
    metrics: Metrics
    totals: ProcessTotals
    settings: Settings
    drain: Drain
    audience: WorkerReplicas
    watch: LedgerGauges
    canary_controller: CanaryController
    serving: PolicyServing
    key_watch: KeyWatch
    ledger: Ledger

    async def wait_until_taken(self, timeout_s: float) -> bool:
        return await self.drain.wait_until_taken(timeout_s)

    def wake_drain(self) -> None:
        self.drain.wake()

    async def take_of_token(self, claims: FeedbackClaims, count: int) -> bool:
        """Count events of a token; False, and none, if it allows less. All are let in while the database is away."""
        if self.audience.database_away:
            return True
        take = partial(self.ledger.explorers.take, f"token {claims.nonce}", count, most=claims.max_events)
        try:
            return await asyncio.to_thread(take, until=claims.expires_at)
        except LedgerUnavailable:
            return True

    def stops(self) -> tuple[Standstill, ...]:
        return self.watch.stops()

    async def exposition(self) -> bytes:
        metrics, outbox = self.metrics, self.audience.outbox_status
        metrics.outbox_bytes.set(outbox.bytes)
        metrics.outbox_records.set(outbox.records)
        metrics.outbox_oldest_seconds.set(0.0 if outbox.since is None else max(0.0, steady_clock() - outbox.since))
        silent = any(stop.code == Code.DATABASE_SILENT for stop in self.stops())
        metrics.database_up.set(self.watch.reached and not (self.audience.database_away or silent))
        for state in EngineState:
            metrics.engines.labels(state.value).set(sum(each.state is state for each in self.fleet.engines))
        return generate_latest(self.totals)


async def open_control_services(
    settings: Settings,
    ledger: Ledger,
    stack: AsyncExitStack,
    *,
    on_failure: OnFailure,
    audience: WorkerReplicas,
) -> tuple[ControlServices, list[Task]]:
    metrics = Metrics()
    own = Outbox(settings.outbox_dir, FILE_BYTES)  # where verdicts are brought to disk
    stack.callback(own.close)
    taken, tell, refused = audience.tell_results, audience.tell_outbox, metrics.outbox_refused.inc
    drain = Drain(settings.outbox_dir, ledger.recording, taken=taken, tell=tell, refused=refused, failed=on_failure)
    drain.owners.add(own.owner)
    drain.start()
    stack.push_async_callback(asyncio.to_thread, drain.stop)
    interval_s = min(settings.explorer.service_status_check_interval, _WATCH_S)

    def forget_files() -> None:
        drain.forget()
        own.begin_new_file()
        audience.begin_new_files()

    forgetting = RetentionLoop(settings, ledger.retention, forget_files, metrics=metrics, interval_s=interval_s)
    fleet, addresses, sockets = await _open_fleet(settings, stack, audience=audience)
    stops, totals = StandstillMonitor(fleet, drain, metrics, audience), ProcessTotals(metrics.registry)
    watch = LedgerGauges(
        ledger, metrics, settings, interval_s=interval_s, outbox=stops.outbox, stops=stops.current, totals=totals
    )
    stack.callback(watch.close)
    reloader = Reloader(settings, fleet, ledger=ledger, metrics=metrics)
    attestation = Attestation(settings, fleet, ledger=ledger, metrics=metrics, reloader=reloader)

    key_watch = KeyWatch(settings, ledger.keys)
    places = fleet.engines[: len({*addresses})]  # those behind them are at the same addresses
    serving = PolicyServing(
        settings, fleet, places, ledger=ledger, metrics=metrics, totals=totals, distrust=attestation.distrust
    )
    await asyncio.gather(asyncio.to_thread(key_watch.open), serving.open())
    require_keys(settings, key_watch.table)
    canary_controller = CanaryController(settings, ledger, totals=totals, metrics=metrics)
    services = ControlServices(
        fleet=fleet,
        serving=serving,
        addresses=addresses,
        metrics=metrics,
        totals=totals,
        canary_controller=canary_controller,
        settings=settings,
        drain=drain,
        audience=audience,
        watch=watch,
        key_watch=key_watch,
        ledger=ledger,
    )
    signer = ReplyIdSigner(load_key(settings.job_dir / KEY))
    arrivals = Arrivals(signer, ledger.explorers)
    judging = settings.judge.url and JudgeLoop(
        settings.judge,
        ledger,
        own,
        metrics=metrics,
        conversation=Conversations(signer, services.wait_until_taken, ledger.reports, arrivals).read,
        wait_until_taken=services.wait_until_taken,
    )
    stops.judge_s = judging.silent_s if judging else stops.judge_s
    return services, [
        watch.run(),
        stops.run(),
        _presence(settings, ledger, fleet, metrics),
        _open_version_log(services, stack, interval_s).run(),
        forgetting.run(),
        *_fine_tuning(services),
        reloader.run(),
        CandidateEvaluation(settings, fleet, ledger=ledger, metrics=metrics, reloader=reloader).run(),
        canary_controller.run(),
        serving.run(),
        attestation.run(),
        key_watch.run(metrics),
        *([judging.run(interval_s)] if judging else []),
        CommitTimer(settings, ledger, wait_until_taken=services.wait_until_taken, metrics=metrics).run(),
        *_supervision(services, ledger, sockets, attestation),
    ]


def _fine_tuning(services: ControlServices) -> list[Task]:
    settings, ledger, metrics, audience = services.settings, services.ledger, services.metrics, services.audience
    taken = services.wait_until_taken
    jobs = ReinforcementJobs(settings, ledger, metrics=metrics, find_url=lambda: audience.url, wait_until_taken=taken)
    checks = LineChecks(settings, ledger, metrics=metrics)
    return [checks.run(), sweep_files(settings, ledger, metrics), jobs.run()]


def _open_version_log(services: ControlServices, stack: AsyncExitStack, interval_s: float) -> VersionLog:
    version_log, settings = VersionLog(services.ledger, services.metrics, interval_s=interval_s), services.settings
    tracing = open_tracing(settings, "explorer")
    if tracing is not None:
        stack.callback(tracing.close)
        experiment, send = f"{settings.project}/{settings.name}", tracing.send
        version_log.tell = lambda event: send(decision_span(event, experiment))
    return version_log


async def _presence(settings: Settings, ledger: Ledger, fleet: Fleet, metrics: Metrics) -> None:
    name, address = settings.explorer_name, f"{await asyncio.to_thread(getfqdn)}:{settings.explorer.proxy_port}"

    async def tell() -> None:
        tried = fleet.split.version if fleet.split else None
        serving = [each.version for each in fleet.engines if each.state is EngineState.READY and each.version != tried]
        see = partial(ledger.explorers.see, name, address=address, release=VERSION)
        await asyncio.to_thread(see, version=min(serving, default=None))

    await every(min(_SEEN_S, settings.explorer.service_status_check_interval), tell, task="explorers", metrics=metrics)


async def _open_fleet(
    settings: Settings, stack: AsyncExitStack, *, audience: FleetReplicas
) -> tuple[Fleet, list[Address], list[Path]]:
    explorer = settings.explorer
    urls = explorer.rollout_model.engine_urls
    sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tuneloop-")))
    count = 0 if urls else explorer.rollout_model.engine_num + settings.spare_places
    own = [sockets / f"{number}.sock" for number in range(count)]
    addresses = [Address(url, None) for url in urls] + [Address(None, str(socket)) for socket in own]
    # One that holds two adapters is two engines at one address.
    addresses += addresses * (settings.engine_places - len(addresses))
    engines, key = [], reveal(explorer.rollout_model.engine_key)
    for number, each in enumerate(addresses):
        session = vllm.open_session(url=each.url, socket=each.socket, key=key)
        await stack.enter_async_context(session)
        control = control_of(settings, session, tolerance=vllm.tolerance(settings))
        http = EngineHttp(url=each.url, socket=each.socket, key=key)
        stack.push_async_callback(http.close)
        engines.append(Engine(number, http, control))
        if (host := engines[addresses.index(each)]) is not engines[number]:
            control.share_engine(host.control)
    for engine in engines[settings.engine_places :]:
        engine.state = EngineState.SPARE
    return Fleet(engines, wait_timeout_s=explorer.request_timeout, replicas=audience), addresses, own


def _supervision(services: ControlServices, ledger: Ledger, own: list[Path], attestation: Attestation) -> list[Task]:
    settings, fleet = services.settings, services.fleet
    verifier, timeout_s = Verifier.of(settings), settings.explorer.rollout_model.health_timeout
    champion = partial(servable_champion, ledger, verifier)
    trial = None
    if settings.explorer.on_reload != "restart" and not settings.model.lora.rank:
        # Whether they can load versions in place is to be found out. A head that engines do not renew shows, and one
        # that shares its numbers with the embeddings does on GPUs.
        config = json.loads((settings.model.model_path / "config.json").read_bytes())
        trial = FleetTrial(fleet, head_is_seen=settings.cluster.gpu_per_node > 0 or not is_tied(config))
    runs: list[Task] = []
    for engine, socket in zip(fleet.engines, own, strict=False):
        process = EngineProcess(settings, engine, socket=socket)
        supervisor = EngineSupervisor(
            engine, process, fleet=fleet, champion=champion, health_timeout_s=timeout_s, trial=trial
        )
        engine.restarts = settings.explorer.on_reload == "restart" and engine.control.loads_in_place
        runs.append(supervisor.run())
    champions = Champions(ledger, verifier, attestation.probes)
    for engine in fleet.engines[len(own) :]:
        attachment = Attachment(
            engine,
            fleet=fleet,
            champions=champions,
            health_timeout_s=timeout_s,
            doubt_restarted=attestation.doubt_restarted,
            host=fleet.engines[0] if own else None,
        )
        runs.append(attachment.run(services.metrics))
    return runs


def is_tied(config: Mapping[str, Any]) -> bool:
    default = str(config.get("model_type")).startswith(_TIED_UNLESS_SAID)
    return bool(config.get("tie_word_embeddings", default))


def decision_span(event: VersionEvent, experiment: str) -> FinishedSpan:
    at, reason = int(event.at * 1_000_000_000), event.reason or ""
    return FinishedSpan(
        name=f"version {event.action.value}",
        id=new_span(),
        started_ns=at,
        ended_ns=at,
        attributes={"tuneloop.version": event.version, "tuneloop.by": event.actor, "tuneloop.reason": reason},
        links=[span_of_version(experiment, event.version)],
    )
