"""The whole explorer in one loop, so that a test can look into all of it: control process and worker, by their channel.

All that the two know of one another goes over a socket, as between processes.
"""

import asyncio
import socket
from contextlib import AsyncExitStack

from tuneloop.explorer import app
from tuneloop.explorer.app import Services, open_outbox
from tuneloop.explorer.auth import Gatekeeper
from tuneloop.explorer.background_tasks import OnFailure, Task
from tuneloop.explorer.channel import AnswerMessage, Channel, ChannelMessage, GetStartInfo, StartInfo
from tuneloop.explorer.edge import Edge
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.processes.control import WorkerProcess, Workers
from tuneloop.explorer.processes.services import open_control_services
from tuneloop.explorer.processes.worker import WorkerLink
from tuneloop.explorer.tokens import TokenSigner
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings


class LoopWorker(WorkerProcess):
    """A worker in the control process's own loop."""

    def __init__(self, ours: socket.socket, serial: int, number: int) -> None:
        super().__init__(serial, number)
        self._ours = ours

    async def run(self, listening: socket.socket, answering: AnswerMessage) -> int:
        self._channel = await Channel.over(self._ours, answering)
        await self._channel.run()
        return 0

    def kill(self) -> None:
        raise AssertionError("it did not take up a change in time")


def create_app(settings: Settings, ledger: Ledger, *, on_failure: OnFailure) -> Edge:
    """The routes, and in the same loop what runs beside them."""
    metrics = Metrics()
    gate = Gatekeeper(settings, TokenSigner(load_key(settings.job_dir / KEY)))
    gate.count_in(metrics.refused)

    async def opening(stack: AsyncExitStack) -> tuple[Services, list[Task]]:
        outbox = open_outbox(settings, stack)
        unused = stack.enter_context(socket.socket())
        workers = Workers(settings, [unused], worker_of=lambda serial, number: LoopWorker(ours, serial, number))
        services, tasks = await open_control_services(settings, ledger, stack, on_failure=on_failure, audience=workers)
        workers.serve_with(services, ledger.transactions.file)
        ours, theirs = socket.socketpair()

        async def answer(question: ChannelMessage) -> object:
            return await link.answer(question)

        channel = await Channel.over(theirs, answer)
        link = WorkerLink(channel, settings, gate=gate, outbox=outbox, metrics=metrics, workers=1)
        running = [asyncio.ensure_future(each) for each in (workers.keep_running(0), channel.run())]

        async def end() -> None:
            workers.stop()
            channel.close()
            await asyncio.gather(*running)

        stack.push_async_callback(end)
        beginning: StartInfo = await channel.ask(GetStartInfo(), StartInfo)
        opened, more = await link.open(ledger, beginning, stack)
        routes.app.state.control = services
        return opened, [*tasks, *more]

    routes = app.create_app(settings, ledger, gate=gate, opening=opening, on_failure=on_failure)
    return routes
