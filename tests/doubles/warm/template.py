"""Python processes that a forked one starts are forked, too, from a process beside it that stays as it was at first.

They are children of whom starts them, as they would be if they were not forked.
"""

import asyncio
import ctypes
import inspect
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.doubles.warm import orders

_PR_SET_CHILD_SUBREAPER = 36

#: Modules that are forked if a process which has a template starts them.
_STARTED = (
    "tuneloop.explorer",
    "tuneloop.explorer.processes.worker",
    "tuneloop.explorer.versions.verifier",
    "tuneloop.trainer",
    orders.SERVICES_OF_TUNE,
)

#: What a template is called in /proc.
NAME = "template-of-a-test"

PARAMETERS = tuple(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def become(order: Mapping[str, Any], descriptors: Sequence[int]) -> list[str]:
    """Make this process what its starter asked for; the command that it is to run."""
    started = Started(order, descriptors, None)
    while started.order["starts"]:
        template = _fork_template(started)
        if isinstance(template, socket.socket):
            _Starter(template, started.order["environment"]).install()
            break
        started = template
    orders.take_up(started.order, started.descriptors)
    if started.told is not None:
        with started.told:
            started.told.send(orders.NUMBER.pack(os.getpid()))
    command: list[str] = started.order["command"]
    return command


class Started(NamedTuple):
    """What a process was asked to become, and whom it tells that it is."""

    order: Mapping[str, Any]
    descriptors: Sequence[int]
    told: socket.socket | None


def _fork_template(started: Started) -> socket.socket | Started:
    """Where to send orders to; in a process that one of them has started, what it was asked."""
    owner, (ours, theirs) = os.getpid(), socket.socketpair()
    signal.set_wakeup_fd(-1)
    if os.fork():
        theirs.close()
        return socket.socket(fileno=orders.out_of_the_way(ours.detach()))
    ours.close()
    orders.end_with_parent(signal.SIGKILL)
    orders.name([NAME])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in range(3):
        os.dup2(nothing, each)
    for each in (nothing, *started.descriptors):
        os.close(each)
    if started.told is not None:
        started.told.close()
    while (taken := orders.receive(theirs)) is not None:
        order, given = taken
        between = os.fork()
        if not between and _is_adopted(owner):
            theirs.close()
            told = socket.socket(fileno=orders.out_of_the_way(given.pop()))
            return Started(order, given, told)
        os.waitpid(between, 0)
        for each in given:
            os.close(each)
    os._exit(0)


def _is_adopted(owner: int) -> bool:
    """Leave this process as a child whose new parent is the owner, which takes up orphans at the moment."""
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.0002)
    if os.getppid() != owner:
        os._exit(1)  # it is gone
    return True


class _Starter:
    """Has the template fork what this process starts, where it can be forked."""

    def __init__(self, template: socket.socket, environment: Mapping[str, str]) -> None:
        self._template = template
        self._read_at_start = orders.read_at_start(environment)
        self._lock = threading.Lock()
        self._execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        self._start = asyncio.create_subprocess_exec

    def install(self) -> None:
        def execute(process: "subprocess.Popen[Any]", *values: Any) -> None:
            given = dict(zip(PARAMETERS, values, strict=True))
            if not self._can_be_forked(given):
                self._execute(process, *values)
                return
            process.pid = self._fork(given)
            process._child_created = True  # type: ignore[attr-defined]
            process._close_pipe_fds(*(given[name] for name in PIPES))  # type: ignore[attr-defined]

        async def start(*command: str, **but: Any) -> Any:
            if orders.module_of(command) not in _STARTED:
                return await self._start(*command, **but)
            return StartedProcess(subprocess.Popen(command, **but))  # noqa: ASYNC220 - it takes milliseconds

        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
        asyncio.create_subprocess_exec = start  # type: ignore[assignment]

    def _can_be_forked(self, given: Mapping[str, Any]) -> bool:
        environment = os.environ if given["env"] is None else given["env"]
        if orders.module_of(given["args"]) not in _STARTED or not orders.can_be_spelled(given["preexec_fn"]):
            return False
        if orders.is_customized(environment):
            return False
        return orders.read_at_start(environment) == self._read_at_start

    def _fork(self, given: Mapping[str, Any]) -> int:
        starts = orders.module_of(given["args"]) == orders.SERVICES_OF_TUNE
        order, descriptors = orders.order_of(given, starts=starts)
        ours, theirs = socket.socketpair()
        with self._lock, ours:
            _take_up_orphans(True)
            try:
                with theirs:
                    orders.send(self._template, order, [*descriptors, theirs.fileno()])
                return orders.number_from(ours)
            finally:
                _take_up_orphans(False)


class StartedProcess:
    """What asyncio.create_subprocess_exec gives, of a process that was forked."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid, self.terminate, self.kill = process.pid, process.terminate, process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        if self._process.poll() is None:
            loop, end, ended = asyncio.get_running_loop(), os.pidfd_open(self.pid), asyncio.Event()
            loop.add_reader(end, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(end)
                os.close(end)
        return self._process.wait()

    async def communicate(self) -> tuple[bytes, None]:
        assert self._process.stdout is not None
        output = await asyncio.to_thread(self._process.stdout.read)
        await self.wait()
        return output, None


def _take_up_orphans(whether: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0)
