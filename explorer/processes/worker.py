"""`python -m tuneloop.explorer.processes.worker CHANNEL SOCKET NUMBER`: answers requests.

The control process starts it. The first two arguments are inherited file descriptors: its end of the channel, and the
listening socket.
"""

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

import structlog
import uvicorn
import uvloop

from tuneloop.explorer.access.feedback_tokens import FeedbackTokens
from tuneloop.explorer.app import Services, create_app, open_spool
from tuneloop.explorer.auth import Gatekeeper
from tuneloop.explorer.background_tasks import Task
from tuneloop.explorer.capture.spool import Spool
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.processes.channel import (
    Channel,
    GetStartInfo,
    ReportFailure,
    StartInfo,
)
from tuneloop.explorer.processes.garbage import keep_what_is_here
from tuneloop.explorer.processes.patient_ledger import PatientLedger
from tuneloop.explorer.processes.worker_link import WorkerLink
from tuneloop.explorer.protocol import Http11
from tuneloop.shared.errors import TuneloopError
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.logging import configure_logging
from tuneloop.shared.privacy.crash_reports import redact_crash_reports
from tuneloop.shared.settings.hardware import explorer_workers_of
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

DRAIN_S = 30
#: Longer than clients keep idle connections (httpx: 5 s), or a request could meet one that is just being closed.
_KEEP_ALIVE_S = 75

_PR_SET_PDEATHSIG = 1


class _Server(uvicorn.Server):
    """Ends cleanly on SIGTERM and SIGINT, with exit code 0; uvicorn itself dies of the signal in the end."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let a signal begin the shutdown."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, and the pages that are open, too."""
        self._stopping.set()
        await super().shutdown(sockets)


class Worker:
    """One process of those that answer requests."""

    def __init__(self, number: int, listening: socket.socket) -> None:
        self._number = number
        self._listening = listening
        self._served = self._failed = self._ended = False
        self._channel: Channel
        self._server: _Server
        self._link: WorkerLink

    async def run(self, end: socket.socket) -> int:
        """Serve until told to stop; the exit code."""
        self._channel = await Channel.over(end, lambda question: self._link.answer(question))
        channel_task = asyncio.create_task(self._run_channel())
        beginning: StartInfo = await self._channel.ask(GetStartInfo(), StartInfo)
        settings = Settings.model_validate_json(beginning.settings)
        redact_crash_reports(settings.privacy)
        async with AsyncExitStack() as stack:
            try:
                spool = open_spool(settings, stack)
            except OSError as error:
                await self._channel.ask(
                    ReportFailure(f"explorer.spool_dir: {error}; make room, or choose another folder")
                )
            else:
                await self._serve(settings, beginning, spool)
        self._ended = True
        channel_task.cancel()
        return 0 if self._served else 1

    async def _serve(self, settings: Settings, beginning: StartInfo, spool: Spool) -> None:
        ledger = PatientLedger.of(settings)
        ledger.transactions.file.identity = beginning.database_file
        metrics = Metrics()
        gate = Gatekeeper(settings, FeedbackTokens(load_key(settings.job_dir / KEY)))
        gate.count_in(metrics.refused)
        self._link = WorkerLink(
            self._channel,
            settings,
            gate=gate,
            spool=spool,
            metrics=metrics,
            workers=explorer_workers_of(settings),
        )

        async def opening(stack: AsyncExitStack) -> tuple[Services, list[Task]]:
            opened = await self._link.open(ledger, beginning, stack)
            keep_what_is_here()
            return opened

        app = create_app(settings, ledger, gate=gate, opening=opening, on_failure=self._fail)
        config = uvicorn.Config(
            app,
            http=Http11,
            ws="none",
            lifespan="on",
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=DRAIN_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
            server_header=False,
        )
        self._server = server = _Server(config, app.app.state.stopping)
        await server.serve(sockets=[self._listening])
        self._served = server.started and not self._failed
        ledger.close()

    async def _run_channel(self) -> None:
        try:
            await self._channel.run()
        finally:
            if not self._ended:
                # Nobody moves the spool, swaps weights or starts us again: what was acknowledged is on disk.
                log.error("control_process_gone", worker=self._number)
                os._exit(1)

    def _fail(self, error: TuneloopError) -> None:
        log.error("worker_failed", worker=self._number, reason=str(error))
        self._failed = True
        self._server.should_exit = True


def main() -> None:
    """Serve until told to stop, or the control process dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    configure_logging()
    keep_what_is_here()
    channel, listening, number = map(int, sys.argv[1:])
    worker = Worker(number, socket.socket(fileno=listening))
    sys.exit(uvloop.run(worker.run(socket.socket(fileno=channel))))


if __name__ == "__main__":
    main()
