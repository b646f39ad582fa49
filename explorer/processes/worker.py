"""`python -m tuneloop.explorer.processes.worker CHANNEL SOCKET NUMBER`: answers requests.

The control process starts it. The first two arguments are inherited file descriptors: its end of the channel, and the
listening socket. The services are opened as the control process says, and follow what it publishes.
"""

import asyncio
import ctypes
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress

import structlog
import uvicorn
import uvloop

from tuneloop.explorer.app import Services, create_app, open_outbox, open_services
from tuneloop.explorer.auth import Gatekeeper
from tuneloop.explorer.background_tasks import Task, every, freeze_garbage
from tuneloop.explorer.channel import (
    AnnounceOwner,
    AnswerAtOnce,
    BeginFile,
    Channel,
    ChannelMessage,
    CollectMetrics,
    ControlClient,
    FleetView,
    GetIdleTimes,
    GetStartInfo,
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
    WaitUntilIdle,
    WorkerMovement,
)
from tuneloop.explorer.edge import Http11
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine, Fleet
from tuneloop.explorer.limits import KeyUsage, descriptors_left
from tuneloop.explorer.metrics import Metrics, process_samples
from tuneloop.explorer.processes.lazy_ledger import LazyLedger
from tuneloop.explorer.recorder import Recorder
from tuneloop.explorer.tokens import TokenSigner
from tuneloop.runner.outbox import Outbox
from tuneloop.shared.errors import ChannelLost, TuneloopError
from tuneloop.shared.held_files import expect_mark
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.logging import LOG, configure_logging
from tuneloop.shared.privacy.detection import redact_crash_reports
from tuneloop.shared.settings.hardware import explorer_workers_of
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import reveal

log = structlog.get_logger()

DRAIN_S = 30
#: Longer than clients keep idle connections (httpx: 5 s), or a request could meet one that is just being closed.
_KEEP_ALIVE_S = 75

_PR_SET_PDEATHSIG = 1


class _Server(uvicorn.Server):
    """Ends cleanly on SIGTERM and SIGINT, with exit code 0; uvicorn itself dies of the signal in the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


class Worker:
    def __init__(self, number: int, listening: socket.socket) -> None:
        self._number = number
        self._listening = listening
        self._served = self._failed = self._ended = False
        self._channel: Channel
        self._server: _Server
        self._link: WorkerLink

    async def run(self, end: socket.socket) -> int:
        self._channel = await Channel.over(end, lambda question: self._link.answer(question))
        channel_task = asyncio.create_task(self._run_channel())
        beginning: StartInfo = await self._channel.ask(GetStartInfo(), StartInfo)
        settings = Settings.model_validate_json(beginning.settings)
        redact_crash_reports(settings.privacy)
        async with AsyncExitStack() as stack:
            try:
                outbox = open_outbox(settings, stack)
            except OSError as error:
                await self._channel.ask(
                    ReportFailure(f"explorer.outbox_dir: {error}; make room, or choose another folder")
                )
            else:
                await self._serve(settings, beginning, outbox)
        self._ended = True
        channel_task.cancel()
        return 0 if self._served else 1

    async def _serve(self, settings: Settings, beginning: StartInfo, outbox: Outbox) -> None:
        ledger = LazyLedger.of(settings)
        ledger.transactions.file.identity = beginning.database_file
        metrics = Metrics()
        expect_mark(settings.job_dir)
        gate = Gatekeeper(settings, TokenSigner(load_key(settings.job_dir / KEY)))
        gate.count_in(metrics.refused)
        self._link = WorkerLink(
            self._channel,
            settings,
            gate=gate,
            outbox=outbox,
            metrics=metrics,
            workers=explorer_workers_of(settings),
        )

        async def opening(stack: AsyncExitStack) -> tuple[Services, list[Task]]:
            opened = await self._link.open(ledger, beginning, stack)
            freeze_garbage()
            return opened

        app = create_app(settings, ledger, gate=gate, opening=opening, on_failure=self._fail)
        config = uvicorn.Config(
            app,
            http=Http11,
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,  # its warnings go the way of all other lines
            timeout_graceful_shutdown=DRAIN_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
            server_header=False,
        )
        self._server = server = _Server(config)
        await server.serve(sockets=[self._listening])
        self._served = server.started and not self._failed
        ledger.close()

    async def _run_channel(self) -> None:
        try:
            await self._channel.run()
        finally:
            if not self._ended:
                # Nobody moves the outbox, swaps weights or starts us again: what was acknowledged is on disk.
                log.error("control_process_gone", worker=self._number)
                LOG.finish()
                os._exit(1)

    def _fail(self, error: TuneloopError) -> None:
        log.error("worker_failed", worker=self._number, reason=str(error))
        self._failed = True
        self._server.should_exit = True


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    configure_logging()
    freeze_garbage()
    channel, listening, number = map(int, sys.argv[1:])
    worker = Worker(number, socket.socket(fileno=listening))
    sys.exit(uvloop.run(worker.run(socket.socket(fileno=channel))))


#: How often the control process gets what was counted here: so much may be missing when this process is killed.
_COUNT_S = 5.0
#: How often workers exchange what keys have used: so long each of them may allow a key its whole limit.
_SHARE_S = 0.25


class WorkerLink:
    """Opens a worker's services, and answers what the control process asks of them."""

    def __init__(
        self,
        channel: Channel,
        settings: Settings,
        *,
        gate: Gatekeeper,
        outbox: Outbox,
        metrics: Metrics,
        workers: int,
    ) -> None:
        self._channel, self._client = channel, ControlClient(channel)
        self._settings = settings
        self._gate = gate
        self._outbox = outbox
        self._recorder: Recorder
        self._metrics = metrics
        LOG.count_dropped = metrics.log_dropped.inc
        self._workers = workers
        self._fleet: Fleet

    async def open(self, ledger: Ledger, beginning: StartInfo, stack: AsyncExitStack) -> tuple[Services, list[Task]]:
        """The services, closed by `stack`, and what must run beside them: from now on the worker serves."""
        engines, key = [], reveal(self._settings.explorer.rollout_model.engine_key)
        for view in beginning.engines:
            http = EngineHttp(url=view.url, socket=view.socket, key=key)
            stack.push_async_callback(http.close)
            engines.append(Engine(view.number, http))
        timeout_s = self._settings.explorer.request_timeout
        self._fleet = Fleet(
            engines,
            wait_timeout_s=timeout_s,
            is_alone=self._workers == 1,
            load_version=self._client.load_version,
        )
        services, tasks = open_services(
            self._settings,
            ledger,
            outbox=self._outbox,
            fleet=self._fleet,
            metrics=self._metrics,
            control_client=self._client,
        )
        self._recorder = services.recorder
        known: FleetView = await self._channel.ask(AnnounceOwner(self._outbox.owner), FleetView)
        await self._fleet.set_split(known.split)
        await self._fleet.apply(known.engines)
        await self._fleet.set_policies(known.policies)
        self._gate.apply(known.keys)
        stack.push_async_callback(self._count)
        tasks.append(every(_COUNT_S, self._count, task="process_metrics", metrics=self._metrics))
        if self._workers > 1:
            tasks.append(every(_SHARE_S, self._share_usage, task="key_usage", metrics=self._metrics))
        return services, tasks

    async def answer(self, question: ChannelMessage) -> object:
        match question:
            case UpdateEngine(engine):
                await self._fleet.apply([engine])
            case UpdateSplit(split):
                await self._fleet.set_split(split)
            case UpdateKeys(table):
                self._gate.apply(table)
            case UpdatePolicies(policies):
                await self._fleet.set_policies(policies)
            case WaitUntilIdle(number, version):
                await self._fleet.wait_until_idle(self._fleet.engines[number], version)
            case GetIdleTimes(number):
                return await self._fleet.idle_times(self._fleet.engines[number])
            case CollectMetrics():
                return process_samples(self._metrics.registry)
            case AnswerAtOnce(stops):
                self._client.note_stops(stops)
                engines = [each.http.quiet for each in self._fleet.engines]
                reply_s = time.monotonic() - max(each.received_at for each in engines)
                quiet, heard = [each.seconds for each in engines], reply_s if math.isfinite(reply_s) else None
                return WorkerMovement(quiet, self._recorder.append_s, heard, descriptors_left())
            case BeginFile():
                await asyncio.to_thread(self._outbox.begin_new_file)
            case UpdateResults(results):
                self._recorder.note_results(results)
            case UpdateOutbox(status, away):
                self._recorder.note_status(status, away=away)
            case _:
                raise TypeError(question)
        return None

    async def _count(self) -> None:
        with suppress(ChannelLost):
            await self._channel.ask(ReportMetrics(process_samples(self._metrics.registry)))

    async def _share_usage(self) -> None:
        with suppress(ChannelLost):
            usage = self._gate.usage()
            if usage:
                self._gate.subtract_others(await self._channel.ask(ShareUsage(usage), dict[str, KeyUsage]))


if __name__ == "__main__":
    main()
