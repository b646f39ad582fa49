"""The process of an app's shadow runs: makes them, asks the app for its tools, and says what they were worth."""

import asyncio
import os
import sys
import threading
import time
import traceback
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, BinaryIO

from tuneloop.runner.production.isolation.app_pipe import Line, dumps, loads, pack_error, unpack_error
from tuneloop.runner.production.shadow_runs import AgentFactory, Rehearsals, ShadowRun
from tuneloop.runner.production.shadow_tools import (
    RemoteReplay,
    RemoteTools,
    Replay,
    ShadowToolCall,
    live_in_shadow_process,
)
from tuneloop.runner.production.strategies import ProductionCall
from tuneloop.runner.production.thread_context import carry_into_threads

#: What runs here gives way to production where there are fewer cores than work.
_NICENESS = 10

_LOOK_FOR_APP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that is to be made: `agent` and `call` as they were written, `tools` by name, and which are async."""

    agent: bytes
    call: bytes
    service: str
    model: str
    api_key: str
    task_id: str
    run_id: str
    tools: dict[str, bool]


def main() -> None:
    """Serve the app on standard input and output; what the runs print goes to standard error."""
    line = Line(_take_standard_input(), _take_standard_output())
    threading.Thread(target=_end_with_the_app, args=(os.getppid(),), daemon=True).start()
    with suppress(OSError):
        os.nice(_NICENESS)
    live_in_shadow_process()
    carry_into_threads(lambda what: isinstance(what, Replay))
    try:
        calculator, timeout_s = line.receive()
        process = ShadowProcess(line, loads(calculator), timeout_s)
    except EOFError:
        return
    except BaseException as error:  # noqa: BLE001 - a module of the app's may end the process when it is imported
        line.send(("refused", *pack_error(error)))
        return
    with suppress(OSError):  # the app is gone
        line.send(("ready",))
        process.serve()


def _take_standard_input() -> BinaryIO:
    """What the app sends; the runs, and what they start, read nothing of it."""
    kept = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return kept


def _take_standard_output() -> BinaryIO:
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return kept


def _end_with_the_app(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_FOR_APP_S)
    os._exit(0)


@dataclass(frozen=True, slots=True)
class _SentCounts:
    """Counts that are kept in the app."""

    line: Line

    def add(self, kind: str, count: int = 1) -> None:
        self.line.send(("add", kind, count))

    def fail(self, kind: str, error: BaseException) -> None:
        self.line.send(("fail", kind, *pack_error(error)))


@dataclass(slots=True)
class ShadowProcess:
    """What is known here of the app, and of the runs that are under way."""

    line: Line
    reward_calculator: Any
    timeout_s: float
    _agents: dict[bytes, AgentFactory] = field(default_factory=dict)
    _asked: dict[int, Future[Any]] = field(default_factory=dict)
    _numbers: Any = field(default_factory=count)

    def serve(self) -> None:
        """Make runs until the app has no more, then end, whatever still runs."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        asyncio.set_event_loop(loop)
        loop.run_forever()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        running: set[asyncio.Task[None]] = set()

        def begin(number: int, job: Job) -> None:
            task = loop.create_task(self._make(number, job))
            running.add(task)
            task.add_done_callback(running.discard)

        try:
            while True:
                kind, number, *rest = self.line.receive()
                if kind == "run":
                    loop.call_soon_threadsafe(begin, number, rest[0])
                else:
                    self._take_answer(number, rest)
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a process that reads no more is of no use; the app starts another
            traceback.print_exc()
        finally:
            os._exit(1)

    async def _make(self, number: int, job: Job) -> None:
        counts = _SentCounts(self.line)
        rewarded = None
        try:
            agent, call = self._agent(job.agent), loads(job.call)
        except Exception as error:  # noqa: BLE001 - the app's classes may refuse to be read in their own way
            counts.fail("shadow_failed", error)
        else:
            rewarded = await self._rehearse(number, job, agent, call, counts)
        try:
            self.line.send(("ended", number, dumps(rewarded)))
        except Exception as error:  # noqa: BLE001 - a reward of a kind that cannot be sent
            counts.fail("reward_failed", error)
            self.line.send(("ended", number, dumps(None)))

    async def _rehearse(
        self, number: int, job: Job, agent: AgentFactory, call: ProductionCall, counts: _SentCounts
    ) -> Any:
        replay, judged_in = self._replay(number, is_run=True), self._replay(number, is_run=False)
        run = ShadowRun(
            service=job.service,
            task_id=job.task_id,
            run_id=job.run_id,
            api_key=job.api_key,
            model=job.model,
            tools=RemoteTools(job.tools, replay),
        )
        rehearsals = Rehearsals(reward_calculator=self.reward_calculator, timeout_s=self.timeout_s, counts=counts)
        return await rehearsals.make(agent, call, run, replay, judged_in)

    def _agent(self, written: bytes) -> AgentFactory:
        """The agent's maker, which is made once."""
        if written not in self._agents:
            self._agents[written] = loads(written)
        return self._agents[written]

    def _replay(self, run: int, *, is_run: bool) -> RemoteReplay:
        def ask(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
            number = next(self._numbers)
            asked: Future[tuple[Any, Exception | None, list[ShadowToolCall]]] = Future()
            self._asked[number] = asked
            try:
                self.line.send(("ask", run, number, is_run, name, dumps((args, kwargs))))
            except Exception as error:  # noqa: BLE001 - arguments that cannot be sent are the caller's to hear of
                del self._asked[number]
                asked.set_exception(error)
            return asked

        return RemoteReplay(ask)

    def _take_answer(self, number: int, answer: list[Any]) -> None:
        asked = self._asked.pop(number)
        written, error, calls = answer
        result, failed = None, None
        try:
            failed = None if error is None else unpack_error(*error)
            result = None if error else loads(written)
        except Exception as unreadable:  # noqa: BLE001 - the app's classes may refuse to be read in their own way
            failed = unreadable
        with suppress(InvalidStateError):  # who asked waits no more
            asked.set_result((result, failed, calls))
