"""Shadow runs in a process of their own, as the app has them: it keeps the counters, and its tools are called here."""

import asyncio
import inspect
import json
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tuneloop.runner.production.isolation.app_pipe import CannotSend, Line, dumps, loads, pack_error, unpack_error
from tuneloop.runner.production.isolation.shadow_process import Job
from tuneloop.runner.production.shadow_counts import ShadowCounts
from tuneloop.runner.production.shadow_runs import AgentFactory, Reward, RewardCalculator, ShadowJob, ShadowRun
from tuneloop.runner.production.shadow_tools import Replay, RunTools, ShadowTools
from tuneloop.runner.production.short_turns import short_turns

_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from tuneloop.runner.production.isolation.shadow_process import main; main()"
)

#: Seconds that the process may take to import the app's modules; between two starts; and to end.
_READY_S, _RESTART_S, _END_S = 60.0, 5.0, 2.0


class ProcessEnded(Exception):
    """The process of shadow runs ended while it made one."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A run of the process: what its tools answer from, and who waits for its reward."""

    replay: Replay
    tools: RunTools
    rewarded: Future[Any] = field(default_factory=Future)


class _Process:
    """One life of it."""

    def __init__(self, hello: object) -> None:
        """Raises OSError if it cannot be started."""
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the app
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.line = Line(self.process.stdout, self.process.stdin)  # type: ignore[arg-type]
        self.under_way: dict[int, _UnderWay] = {}
        self.ready: Future[None] = Future()
        self.line.send(hello)

    @property
    def has_ended(self) -> bool:
        """Whether it was ready once, and is no more."""
        return self.process.poll() is not None and self.ready.done() and self.ready.exception() is None

    def end(self) -> None:
        """Let it end, and see that it does."""
        if not self.line.end(_END_S):
            self.process.kill()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.line.end(_END_S)

    def fail(self, error: Exception) -> None:
        """Nothing more comes of it."""
        for waiting in (self.ready, *(each.rewarded for each in list(self.under_way.values()))):
            if not waiting.done():
                waiting.set_exception(error)


class RemoteRuns:
    """Has shadow runs made in the process, which is started again if it ends."""

    def __init__(
        self,
        agent: AgentFactory,
        reward_calculator: RewardCalculator,
        tools: ShadowTools,
        *,
        timeout_s: float,
        counts: ShadowCounts,
    ) -> None:
        """Raises CannotSend if one of the functions cannot be sent, or there can be no process."""
        self._hello = dumps(reward_calculator), timeout_s
        self._tools, self._counts = tools, counts
        self._written: dict[int, tuple[AgentFactory, bytes]] = {}
        self._write(agent)
        self._number = 0
        self._closed = False
        self._lock = asyncio.Lock()
        self._process = self._start()

    def _start(self) -> _Process:
        try:
            process = _Process(self._hello)
        except OSError as error:
            raise CannotSend(f"no process can be started: {error}") from error
        threading.Thread(target=self._read, args=(process,), name="tuneloop-shadow-reader", daemon=True).start()
        return process

    async def make(self, job: ShadowJob, run: ShadowRun) -> tuple[Reward] | None:
        """The reward of one run; None if there is none. Raises CannotSend if it cannot be made there."""
        agent, call = self._write(job.agent), dumps(job.call)
        process = await self._running()
        replay = Replay(job.recorded, job.loop)
        under_way = _UnderWay(replay, self._tools.bound_to(replay))
        self._number += 1
        number = self._number
        process.under_way[number] = under_way
        names = {name: inspect.iscoroutinefunction(under_way.tools[name]) for name in under_way.tools}
        sent = Job(
            agent=agent,
            call=call,
            service=run.service,
            model=run.model,
            api_key=run.api_key,
            task_id=run.task_id,
            run_id=run.run_id,
            tools=names,
        )
        try:
            process.line.send(("run", number, sent))
            found: tuple[Reward] | None = await asyncio.wrap_future(under_way.rewarded)
        except (OSError, ValueError, ProcessEnded) as error:  # ValueError: its pipe was closed
            self._counts.fail("shadow_failed", ProcessEnded(str(error)))
            return None
        finally:
            process.under_way.pop(number, None)
        return found

    def close(self) -> None:
        """End the process, and what it still does."""
        self._closed = True
        self._process.end()

    async def _running(self) -> _Process:
        """The process once it is ready. Raises CannotSend if it is not to be had."""
        async with self._lock:
            if self._process.has_ended and not self._closed:
                await asyncio.sleep(max(0.0, self._process.began + _RESTART_S - time.monotonic()))
                self._process = self._start()
            process = self._process
        try:
            async with asyncio.timeout(_READY_S):
                await asyncio.shield(asyncio.wrap_future(process.ready))
        except TimeoutError:
            process.fail(CannotSend(f"the app's modules were not imported within {_READY_S:g} s"))
            process.process.kill()
            raise CannotSend(f"the app's modules were not imported within {_READY_S:g} s") from None
        return process

    def _write(self, agent: AgentFactory) -> bytes:
        known = self._written.get(id(agent))
        if known is None:
            known = self._written[id(agent)] = agent, dumps(agent)
        return known[1]

    def _read(self, process: _Process) -> None:
        """Handle what the process says until it ends."""
        try:
            while True:
                kind, *rest = process.line.receive()
                self._handle(process, kind, rest)
        except EOFError:
            code = process.process.wait()
            error = f"the process of shadow runs ended with {code}"
        except Exception as broken:  # noqa: BLE001 - a line that is broken is of no more use
            process.process.kill()
            error = f"the line to the process of shadow runs broke: {broken!r}"
        if not process.ready.done():
            process.ready.set_exception(CannotSend(error))
        process.fail(ProcessEnded(error))
        process.line.close(_END_S)

    def _handle(self, process: _Process, kind: str, rest: list[Any]) -> None:
        if kind == "ready":
            process.ready.set_result(None)
        elif kind == "refused":
            process.ready.set_exception(CannotSend(f"its process says: {unpack_error(*rest)!r}"))
        elif kind == "add":
            self._counts.add(*rest)
        elif kind == "fail":
            failed, *error = rest
            self._counts.fail(failed, unpack_error(*error))
        elif kind == "ended":
            number, rewarded = rest
            if (under_way := process.under_way.get(number)) is not None and not under_way.rewarded.done():
                under_way.rewarded.set_result(loads(rewarded))
        elif kind == "ask":
            threading.Thread(
                target=self._answer, args=(process, *rest), name="tuneloop-shadow-tool", daemon=True
            ).start()

    def _answer(self, process: _Process, number: int, asked: int, is_run: bool, name: str, arguments: bytes) -> None:
        """Call one of the app's tools, as in the run that asks for it."""
        written, failed, calls = b"", None, []
        try:
            args, kwargs = loads(arguments)
            under_way = process.under_way[number]
            replay = under_way.replay if is_run else Replay((), under_way.replay.loop)
            tools = under_way.tools if is_run else self._tools.bound_to(replay)
            try:
                with short_turns():
                    result = tools[name](*args, **kwargs)
                    written = dumps(asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result)
            finally:
                calls = list(replay.calls)
        except Exception as error:  # noqa: BLE001 - the run's to hear of, whatever it is
            failed = pack_error(error)
        with suppress(OSError, ValueError):  # the run is over, and its process ended
            process.line.send(("answer", asked, written, failed, calls))


async def _wait_for(result: Awaitable[Any]) -> Any:
    """In a loop of its own, which only waits: the tool itself runs in production's."""
    return await result
