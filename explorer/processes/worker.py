"""`python -m tuneloop.explorer.processes.worker CHANNEL NUMBER SOCKET…`: answers requests.

The control process starts it.

The arguments but one are inherited file descriptors: its end of the channel, and every worker's listening socket, of
which the one of that number is its own.
"""

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import structlog
import uvicorn
import uvloop

from tuneloop.explorer.access.feedback_tokens import FeedbackTokens
from tuneloop.explorer.access.gatekeeper import Gatekeeper
from tuneloop.explorer.access.rate_limits import KeyUsage
from tuneloop.explorer.app import Services, create_app, open_services, open_spool
from tuneloop.explorer.background_tasks import Task, every
from tuneloop.explorer.capture.control_client import ShadowReply
from tuneloop.explorer.capture.spool import Spool
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine, Fleet
from tuneloop.explorer.http.caller import FeedbackBinding
from tuneloop.explorer.http.server import FastProtocol
from tuneloop.explorer.metrics import Metrics, process_samples
from tuneloop.explorer.processes.channel import (
    AnnounceSlot,
    Channel,
    ChannelMessage,
    CollectMetrics,
    EngineView,
    FleetView,
    GetExposition,
    GetStartInfo,
    ReportFailure,
    ReportMetrics,
    ReportShadowReply,
    ServeSocket,
    ShareUsage,
    StartInfo,
    StartSegment,
    TakeOfToken,
    UpdateEngine,
    UpdateKeys,
    UpdateSplit,
    WaitUntilFlushed,
    WaitUntilIdle,
)
from tuneloop.explorer.processes.patient_ledger import PatientLedger
from tuneloop.shared.errors import ChannelLost, RequestRefused, TuneloopError
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.logging import configure_logging
from tuneloop.shared.privacy.crash_reports import redact_crash_reports
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import reveal

log = structlog.get_logger()

DRAIN_S = 30
#: Longer than clients keep idle connections (httpx: 5 s), or a request could meet one that is just being closed.
_KEEP_ALIVE_S = 75
#: How often the control process hears what was counted here: so much may be missing when this process is killed.
_COUNT_S = 5.0
#: How often workers tell each other what keys have taken: so long each of them may allow a key its whole limit.
_SHARE_S = 0.25

_PR_SET_PDEATHSIG = 1


#: How long the control process may take beyond the time that it was given, for the metrics, and for a token.
_GRACE_S, _EXPOSITION_S, _TOKEN_S = 0.5, 5.0, 2.0


class ChannelControlClient:
    """The control process, as the routes see it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def wait_until_flushed(self, timeout_s: float, tenant: str | None = None, key: str | None = None) -> bool:
        """Wait until all that is on disk, or of a tenant, or of a key of it, is in the database.

        False if it is not by then, or away.
        """
        try:
            question = WaitUntilFlushed(timeout_s, tenant, key)
            return bool(await self._channel.ask(question, bool, timeout_s=timeout_s + _GRACE_S))
        except ChannelLost as error:  # what is on disk is safe there all the same
            log.warning("control_process_silent", reason=str(error))
            return False

    async def take_of_token(self, binding: FeedbackBinding, count: int) -> bool:
        """Count events that a browser's token brings, to any worker; False, and none, if it allows less."""
        return bool(await self._answer_to(TakeOfToken(binding, count), bool, _TOKEN_S))

    async def report_shadow_reply(self, reply: ShadowReply) -> None:
        """Let those hear of a copy who decide about the version that it went to."""
        with suppress(ChannelLost):
            await self._channel.ask(ReportShadowReply(reply))

    async def exposition(self) -> bytes:
        """The metrics of the whole service."""
        return bytes(await self._answer_to(GetExposition(), bytes, _EXPOSITION_S))

    async def _answer_to(self, question: ChannelMessage, kind: Any, timeout_s: float) -> Any:
        try:
            return await self._channel.ask(question, kind, timeout_s=timeout_s)
        except ChannelLost as error:
            raise RequestRefused(str(error), status=503, code="control_process_silent", retry_after_s=1.0) from None


class _Server(uvicorn.Server):
    """Ends cleanly on SIGTERM and SIGINT, with exit code 0; uvicorn itself dies of the signal in the end."""

    def __init__(self, config: uvicorn.Config, sockets: Sequence[socket.socket], stopping: asyncio.Event) -> None:
        super().__init__(config)
        self._sockets = sockets
        self._stopping = stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let a signal begin the shutdown."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, and leave no socket open where others could wait for us in vain."""
        self._stopping.set()  # else pages that are open would be waited for
        await super().shutdown([*self._sockets])


class Worker:
    """One process of those that answer requests."""

    def __init__(self, number: int, sockets: Sequence[socket.socket]) -> None:
        self._number = number
        self._sockets = sockets
        self._metrics = Metrics()
        self._gate: Gatekeeper
        self._minded: dict[int, asyncio.Server] = {}
        self._served = self._failed = self._ended = False
        self._channel: Channel
        self._settings: Settings
        self._server: _Server
        self._fleet: Fleet
        self._spool: Spool

    async def run(self, end: socket.socket) -> int:
        """Serve until told to stop; the exit code."""
        self._channel = await Channel.over(end, self._answer)
        channel_task = asyncio.create_task(self._run_channel())
        beginning: StartInfo = await self._channel.ask(GetStartInfo(), StartInfo)
        self._settings = settings = Settings.model_validate_json(beginning.settings)
        redact_crash_reports(settings.privacy)
        async with AsyncExitStack() as stack:
            try:
                self._spool = open_spool(settings, stack)
            except OSError as error:
                await self._channel.ask(
                    ReportFailure(f"explorer.spool_dir: {error}; make room, or choose another folder")
                )
            else:
                await self._serve(settings, beginning)
        self._ended = True
        channel_task.cancel()
        return 0 if self._served else 1

    async def _serve(self, settings: Settings, beginning: StartInfo) -> None:
        ledger = PatientLedger.of(settings)
        ledger.transactions.file.identity = beginning.database_file
        self._gate = Gatekeeper(settings, FeedbackTokens(load_key(settings.job_dir / KEY)))
        self._gate.count_in(self._metrics.refused)
        app = create_app(
            settings, ledger, gate=self._gate, opening=partial(self._open, ledger, beginning), on_failure=self._fail
        )
        config = uvicorn.Config(
            app,
            http=FastProtocol,
            lifespan="on",
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=DRAIN_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
            server_header=False,
        )
        self._server = server = _Server(config, self._sockets, app.app.state.stopping)
        await server.serve(sockets=[self._sockets[self._number]])
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

    async def _open(
        self, ledger: PatientLedger, beginning: StartInfo, stack: AsyncExitStack
    ) -> tuple[Services, list[Task]]:
        engines = [await self._open_engine(each, stack) for each in beginning.engines]
        self._fleet = Fleet(engines, wait_timeout_s=self._settings.explorer.request_timeout)
        services, tasks = open_services(
            self._settings,
            ledger,
            spool=self._spool,
            fleet=self._fleet,
            metrics=self._metrics,
            control_client=ChannelControlClient(self._channel),
        )
        known: FleetView = await self._channel.ask(AnnounceSlot(str(self._spool.folder)), FleetView)
        await self._fleet.set_split(known.split)
        await self._fleet.apply(known.engines)
        self._gate.apply(known.keys)
        stack.push_async_callback(self._count)
        tasks.append(every(_COUNT_S, self._count, task="process_metrics", metrics=self._metrics))
        if self._settings.explorer.workers > 1:
            tasks.append(every(_SHARE_S, self._share_usage, task="key_usage", metrics=self._metrics))
        return services, tasks

    async def _open_engine(self, view: EngineView, stack: AsyncExitStack) -> Engine:
        key = self._settings.explorer.rollout_model.engine_key
        http = EngineHttp(url=view.url, socket=view.socket, key=reveal(key))
        stack.push_async_callback(http.close)
        return Engine(view.number, http)

    def _fail(self, error: TuneloopError) -> None:
        log.error("worker_failed", worker=self._number, reason=str(error))
        self._failed = True
        self._server.should_exit = True

    async def _count(self) -> None:
        with suppress(ChannelLost):
            await self._channel.ask(ReportMetrics(process_samples(self._metrics.registry)))

    async def _share_usage(self) -> None:
        """Hear what the keys have taken of other workers."""
        with suppress(ChannelLost):
            usage = self._gate.usage()
            if usage:
                self._gate.subtract_others(await self._channel.ask(ShareUsage(usage), dict[str, KeyUsage]))

    async def _answer(self, question: Any) -> object:
        """What the control process asks; none of it before it has been told what is written to."""
        match question:
            case UpdateEngine(engine):
                await self._fleet.apply([engine])
            case UpdateSplit(split):
                await self._fleet.set_split(split)
            case UpdateKeys(table):
                self._gate.apply(table)
            case WaitUntilIdle(number):
                await self._fleet.engines[number].idle.wait()
            case CollectMetrics():
                return process_samples(self._metrics.registry)
            case StartSegment():
                self._spool.renew()
            case ServeSocket(number, yours):
                await self._mind(number, yours)
            case _:
                raise TypeError(question)
        return None

    async def _mind(self, number: int, yours: bool) -> None:
        """Take in, or no more, those who come to the socket of a worker that is being started again."""
        server = self._server
        if not yours and (minded := self._minded.pop(number, None)):
            minded.close()
            server.servers.remove(minded)
        elif yours and number not in self._minded and not server.should_exit:
            config = server.config
            door = partial(
                FastProtocol, config=config, server_state=server.server_state, app_state=server.lifespan.state
            )
            # A copy: a server closes its socket.
            copy = self._sockets[number].dup()
            minded = await asyncio.get_running_loop().create_server(door, sock=copy, backlog=config.backlog)
            self._minded[number] = minded
            server.servers.append(minded)


def main() -> None:
    """Serve until told to stop, or the control process dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    configure_logging()
    # What is imported stays: it need not be looked through for garbage. What a reply is made of goes without that.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    channel, number, *sockets = map(int, sys.argv[1:])
    worker = Worker(number, [socket.socket(fileno=each) for each in sockets])
    sys.exit(uvloop.run(worker.run(socket.socket(fileno=channel))))


if __name__ == "__main__":
    main()
