"""The control process: binds the port, keeps the workers running, and does what is done once for all."""

import asyncio
import itertools
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import structlog

from tuneloop.explorer.background_tasks import freeze_garbage, run_task
from tuneloop.explorer.channel import (
    AnnounceOwner,
    AnswerAtOnce,
    AnswerMessage,
    BeginFile,
    Channel,
    ChannelMessage,
    CollectMetrics,
    FleetView,
    GetExposition,
    GetIdleTimes,
    GetStartInfo,
    LoadVersion,
    ReportFailure,
    ReportMetrics,
    ShareUsage,
    StartInfo,
    UpdateEngine,
    UpdateKeys,
    UpdateOutbox,
    UpdatePolicies,
    UpdateResults,
    UpdateSplit,
    UseFeedbackToken,
    WaitUntilIdle,
    WaitUntilTaken,
    WakeDrain,
    WorkerMovement,
)
from tuneloop.explorer.engines.fleet import Engine, EngineView, TrafficSplit
from tuneloop.explorer.engines.model_routes import PolicyView
from tuneloop.explorer.limits import SharedUsage
from tuneloop.explorer.metrics import MetricSample
from tuneloop.explorer.older_spool import convert
from tuneloop.explorer.processes.lazy_ledger import open_ledger
from tuneloop.explorer.processes.services import ControlServices, open_control_services
from tuneloop.shared.errors import ChannelLost, EnvironmentRefused, LedgerError, TuneloopError
from tuneloop.shared.ledger.facts import Standstill
from tuneloop.shared.ledger.keys import KeyTable
from tuneloop.shared.ledger.recording.feedback import FeedbackResults
from tuneloop.shared.ledger.storage.database import DatabaseFile
from tuneloop.shared.operations.older_ledger import report_older
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.settings.hardware import explorer_workers_of
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import WITH_SECRETS

log = structlog.get_logger()

#: How long a worker may take to receive an engine's change; then it is killed, for it could mark replies wrongly.
_LEARN_S = 10.0
_COUNT_S = 1.0
#: A worker gets thirty seconds to end its streams, and then some.
_STOP_S = 45.0
#: How long a worker may take from its last word to its end.
_EXIT_S = 5.0

#: How often a worker that has never served may be killed in a row: then something kills them all, such as a limit on
#: memory.
_KILLED_STARTS = 5

#: How often a worker's event loop is asked for an answer, and how long that may take. A worker that gives none twice in
#: a row is replaced. The loop of one that computes in a thread turns meanwhile.
_ASK_S, _ANSWER_S, _MISSES = 1.0, 2.5, 2

#: Between a worker's end and its next start; twice as long each time, unless it lived for _LIVED_S.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_LIVED_S = 60.0


class WorkerProcess:
    def __init__(self, serial: int, number: int) -> None:
        self.serial = serial
        self.number = number
        self.owner = ""
        self.movement: WorkerMovement | None = None
        self.reason = ""
        self._stopping = False
        self._process: Process | None = None
        self._channel: Channel

    async def run(self, listening: socket.socket, answering: AnswerMessage) -> int:
        """Start it and wait for its end; the exit code. Raises OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        inherited = theirs.fileno(), listening.fileno()
        with theirs:
            try:
                self._process = process = await asyncio.create_subprocess_exec(
                    *(
                        sys.executable,
                        "-P",
                        "-m",
                        "tuneloop.explorer.processes.worker",
                        *map(str, (*inherited, self.number)),
                    ),
                    stdin=DEVNULL,
                    pass_fds=inherited,
                    # Ctrl-C is for us, who let the workers end what they have begun.
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        try:
            self._channel = await Channel.over(ours, answering)
            if self._stopping:
                process.terminate()
            await self._channel.run()  # to its end: no other process has the other one
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _EXIT_S)
        finally:
            self.kill()
            code = await process.wait()
        return code

    def tell(self, message: ChannelMessage) -> None:
        self._channel.tell(message)

    async def ask(self, question: ChannelMessage, kind: Any = None, *, timeout_s: float | None = None) -> Any:
        """What it answers. Raises ChannelLost if nothing."""
        return await self._channel.ask(question, kind, timeout_s=timeout_s)

    def stop(self) -> None:
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


async def _kill_when_frozen(worker: WorkerProcess, stops: Callable[[], tuple[Standstill, ...]]) -> None:
    """End a worker that serves when its event loop stands still: stopped, or blocked. `stops` gets the fact."""
    misses = 0
    while misses < _MISSES:
        await asyncio.sleep(_ASK_S)
        if not worker.owner:
            continue
        began = asyncio.get_running_loop().time()
        try:
            worker.movement = await worker.ask(AnswerAtOnce(stops()), WorkerMovement | None, timeout_s=_ANSWER_S)
            misses = 0
        except ChannelLost:
            # One that ends loses its channel at once, and is waited for.
            misses += asyncio.get_running_loop().time() - began >= _ANSWER_S
    worker.reason = f"its event loop stood still for {_MISSES * _ANSWER_S:g} seconds"
    worker.kill()


class Workers:
    def __init__(
        self,
        settings: Settings,
        sockets: Sequence[socket.socket],
        *,
        worker_of: Callable[[int, int], WorkerProcess] = WorkerProcess,
    ) -> None:
        """`worker_of` makes the worker of a serial and a number."""
        self._settings = settings
        self._worker_of = worker_of
        self._sockets = sockets
        self._serials = itertools.count()
        self._running: dict[int, WorkerProcess] = {}
        self._stopping = asyncio.Event()
        self._services: ControlServices
        self._database: DatabaseFile
        self._begun = asyncio.Event()
        self._usage = SharedUsage()
        self._loop = asyncio.get_running_loop()
        self.outbox_status, self.database_away = OutboxStatus(), False

    def serve_with(self, services: ControlServices, database: DatabaseFile) -> None:
        self._services, self._database = services, database

        async def publish_keys(table: KeyTable) -> None:
            await self._ask_all(UpdateKeys(table), kill=True, timeout_s=_LEARN_S)

        services.key_watch.subscribe(publish_keys)
        self._begun.set()

    async def keep_running(self, number: int) -> None:
        """Run one worker until `stop`. Raises TuneloopError if it never serves; being killed is no failure."""
        pause, has_served, killed, loop = _PAUSE_S, False, 0, asyncio.get_running_loop()
        while not self._stopping.is_set():
            started = loop.time()
            self._running[number] = worker = self._worker_of(next(self._serials), number)
            watching = asyncio.create_task(_kill_when_frozen(worker, self.stops))
            try:
                code = await worker.run(self._sockets[number], partial(self._answer, worker))
            except OSError as error:
                code, worker.reason = os.EX_OSERR, f"explorer.workers: a worker cannot be started: {error}"
            finally:
                watching.cancel()
            has_served = has_served or bool(worker.owner)
            self._running.pop(number)
            self._usage.retire(worker.serial)
            if self._begun.is_set():
                self._services.totals.retire(worker.serial)
            if self._stopping.is_set():
                return
            killed = killed + 1 if code < 0 and not worker.reason else 0
            if not has_served and not 0 < killed < _KILLED_STARTS:
                raise EnvironmentRefused(worker.reason or f"explorer.workers: a worker died at start ({code})")
            log.error("worker_down", worker=number, exit_code=code, reason=worker.reason)
            pause = _PAUSE_S if loop.time() - started > _LIVED_S else min(2 * pause, _LONGEST_PAUSE_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def stop(self) -> None:
        self._stopping.set()
        for worker in self._running.values():
            worker.stop()

    def kill(self) -> None:
        for worker in self._running.values():
            worker.kill()

    async def publish(self, engine: Engine) -> None:
        await self._ask_all(UpdateEngine(_view(engine, self._services)), kill=True, timeout_s=_LEARN_S)

    async def set_split(self, split: TrafficSplit | None) -> None:
        await self._ask_all(UpdateSplit(split), kill=True, timeout_s=_LEARN_S)

    def tell_results(self, owner: str, results: FeedbackResults) -> None:
        """Let the worker that took feedback know what became of it; from any thread."""
        self._loop.call_soon_threadsafe(self._tell, UpdateResults(results), owner)

    def tell_outbox(self, status: OutboxStatus, away: bool) -> None:
        """Let all workers know how much waits for the database; from any thread."""
        self.outbox_status, self.database_away = status, away
        self._loop.call_soon_threadsafe(self._tell, UpdateOutbox(status, away))

    def stops(self) -> tuple[Standstill, ...]:
        return self._services.stops() if self._begun.is_set() else ()

    @property
    def url(self) -> str:
        host, port = self._sockets[0].getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def movements(self) -> list[WorkerMovement]:
        return [worker.movement for worker in self._serving if worker.movement is not None]

    def begin_new_files(self) -> None:
        self._tell(BeginFile())

    def _tell(self, message: ChannelMessage, owner: str | None = None) -> None:
        for worker in self._serving:
            if owner in (None, worker.owner):
                worker.tell(message)

    async def set_policies(self, policies: Sequence[PolicyView] | None) -> None:
        known = None if policies is None else [*policies]
        await self._ask_all(UpdatePolicies(known), kill=True, timeout_s=_LEARN_S)

    async def wait_until_idle(self, engine: Engine, version: int | None = None) -> None:
        await self._ask_all(WaitUntilIdle(engine.number, version))

    async def idle_times(self, engine: Engine) -> Mapping[int, float]:
        found: dict[int, float] = {}
        for told in await self._ask_all(GetIdleTimes(engine.number), dict[int, float], timeout_s=_LEARN_S):
            found |= {version: min(seconds, found.get(version, seconds)) for version, seconds in (told or {}).items()}
        return found

    @property
    def _serving(self) -> list[WorkerProcess]:
        return [worker for worker in self._running.values() if worker.owner]

    async def _ask_all(
        self, question: ChannelMessage, kind: Any = None, *, kill: bool = False, timeout_s: float | None = None
    ) -> list[Any]:
        """What they answer; None for one that does not."""

        async def ask(worker: WorkerProcess) -> Any:
            try:
                return await worker.ask(question, kind, timeout_s=timeout_s)
            except ChannelLost as error:
                log.error("worker_update_failed", worker=worker.number, reason=str(error))
                if kill:
                    worker.kill()

        return await asyncio.gather(*map(ask, self._serving))

    async def _answer(self, worker: WorkerProcess, question: ChannelMessage) -> object:
        await self._begun.wait()
        services = self._services
        match question:
            case GetStartInfo():
                explorer, count = self._settings.explorer, explorer_workers_of(self._settings)
                # Its share of what all of them may have in flight.
                shares = {name: -(-getattr(explorer, name) // count) for name in ("max_in_flight", "max_waiting")}
                settings = self._settings.model_copy(update={"explorer": explorer.model_copy(update=shares)})
                data = settings.model_dump_json(context=WITH_SECRETS).encode()
                return StartInfo(data, _views(services), self._database.identity)
            case AnnounceOwner(owner):
                services.drain.owners.add(owner)
                worker.owner = owner  # from now on it receives every change
                return FleetView(
                    _views(services), services.fleet.split, services.key_watch.table, services.serving.views
                )
            case WaitUntilTaken(timeout_s):
                return await services.wait_until_taken(timeout_s)
            case WakeDrain():
                services.wake_drain()
            case UseFeedbackToken(claims, count):
                return await services.take_of_token(claims, count)
            case ShareUsage(usage):
                return self._usage.exchange(worker.serial, usage)
            case LoadVersion(policy, version):
                return await services.serving.load(policy, version)
            case GetExposition():
                return await self._exposition()
            case ReportMetrics(samples):
                services.totals.update(worker.serial, samples)
            case ReportFailure(reason):
                worker.reason = reason
            case _:
                raise TypeError(question)
        return None

    async def _exposition(self) -> bytes:
        async def count(worker: WorkerProcess) -> None:
            with suppress(ChannelLost):
                samples = await worker.ask(CollectMetrics(), list[MetricSample], timeout_s=_COUNT_S)
                if self._running.get(worker.number) is worker:
                    self._services.totals.update(worker.serial, samples)

        await asyncio.gather(*map(count, self._serving))
        return await self._services.exposition()


async def control(settings: Settings, sockets: Sequence[socket.socket]) -> None:
    """Serve until SIGTERM or SIGINT. Raises TuneloopError if it cannot."""
    failures: list[TuneloopError] = []
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)

    def fail(error: TuneloopError) -> None:
        failures.append(error)
        loop.call_soon_threadsafe(ending.set)

    workers = Workers(settings, sockets)
    async with AsyncExitStack() as stack:
        # They import what they need while the database is opened.
        serving = [loop.create_task(run_task(workers.keep_running(each), fail)) for each in range(len(sockets))]
        stack.push_async_callback(_end, workers, serving)
        ledger = await asyncio.to_thread(open_ledger, settings)
        stack.callback(ledger.close)
        try:
            if (lost := await asyncio.to_thread(report_older, settings.job_dir, ledger)) is not None:
                log.error("ledger_older", sentence=lost)
        except (LedgerError, OSError) as error:
            log.warning("ledger_not_compared", reason=str(error))
        await asyncio.to_thread(convert, (settings.outbox_dir, settings.job_dir / "spool"), settings.outbox_dir)
        services, tasks = await open_control_services(settings, ledger, stack, on_failure=fail, audience=workers)
        host, port = sockets[0].getsockname()[:2]
        url = f"http://{host}:{port}"
        log.info(
            "explorer_listening",
            url=url,
            page=f"{url}/ui",
            model=settings.served_model_name,
            workers=len(sockets),
        )
        if settings.explorer.insecure:
            log.warning(
                "no_authentication", sentence="every program that reaches this port can chat, give feedback and commit"
            )
        elif not services.key_watch.table.in_force:
            log.info("no_keys", sentence="programs of this machine need no key; make one: tuneloop keys create")
        freeze_garbage()
        workers.serve_with(services, ledger.transactions.file)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run_task(task, fail)) for task in tasks]
            await ending.wait()
            log.info("explorer_stopping", sentence="replies in flight are ended first, within 45 s")
            for each in sockets:
                each.close()
            await _end(workers, serving)
            for task in running:
                task.cancel()
    if failures:
        raise failures[0]


async def _end(workers: Workers, serving: Sequence["asyncio.Task[None]"]) -> None:
    workers.stop()
    _, still = await asyncio.wait(serving, timeout=_STOP_S)
    if still:
        workers.kill()
        await asyncio.wait(still)


def _views(services: ControlServices) -> list[EngineView]:
    return [_view(engine, services) for engine in services.fleet.engines]


def _view(engine: Engine, services: ControlServices) -> EngineView:
    address = services.addresses[engine.number]
    return EngineView(
        number=engine.number,
        url=address.url,
        socket=address.socket,
        state=engine.state,
        version=engine.version,
        loads=engine.loads,
        renaming=engine.renaming,
        proof=engine.proof,
        packs=engine.packs,
        adapters=tuple(engine.control.held.values()),
    )
