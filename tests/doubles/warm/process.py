"""Processes that are forked from one which has imported what they need, in place of a Python started for each.

To import an explorer takes a second or two of a processor, a trainer five: more than most tests need of them.
"""

import atexit
import functools
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.doubles.warm import orders
from tests.doubles.warm.template import PARAMETERS, PIPES

SERVICES = (
    "tuneloop.explorer.__main__",
    "tuneloop.explorer.processes.worker",
    "tuneloop.explorer.versions.verifier",
    "tuneloop.cli.main",
)
TRAINING = ("tuneloop.trainer.__main__", "tuneloop.trainer.loop", "tuneloop.trainer.workers.rank")

#: What all of a service is, both parts.
BOTH = (*SERVICES, *TRAINING)

#: How long a command's name in /proc may be.
_NAME_CHARACTERS = 4096


class WarmServer:
    """The process that they are forked from."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        """It has imported `modules`, and read `variables` when it started."""
        others = {name: value for name, value in os.environ.items() if not orders.is_read_at_start(name)}
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", str(Path(__file__).with_name("server.py"))),
                    *(str(theirs.fileno()), ",".join(modules), "." * _NAME_CHARACTERS),
                ],
                env=others | variables,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._orders = ours
        self._lock = threading.Lock()
        atexit.register(self._end)

    def _end(self) -> None:
        self._orders.close()
        self._process.wait()

    def order(self, what: Mapping[str, Any], descriptors: Sequence[int]) -> tuple[int, socket.socket]:
        """Start a process; its pid, and where its status comes once it has ended."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            orders.send(self._orders, what, [*descriptors, theirs.fileno()])
        return orders.number_from(ours), ours


class WarmProcess(subprocess.Popen[Any]):
    """A Python command as a process. Its parent is not the test, which is told of its end all the same."""

    _status: socket.socket | None = None

    def __init__(
        self,
        command: Sequence[str],
        *,
        modules: Sequence[str] = SERVICES,
        ends_with_tests: bool = False,
        starts: bool = False,
        **but: Any,
    ) -> None:
        """`modules` are imported before; `ends_with_tests`: it gets SIGTERM when the tests end; `but` are Popen's.

        `starts`: what it starts of ours is forked, too, as it is where the command is a service's.
        """
        self._modules, self._ends_with_tests, self._starts = tuple(modules), ends_with_tests, starts
        super().__init__(command, **but)

    def _execute_child(self, *values: Any) -> None:
        given = dict(zip(PARAMETERS, values, strict=True))
        environment = os.environ if given["env"] is None else given["env"]
        refused = [name for name in ("preexec_fn", "pass_fds", "executable", "shell") if given[name]]
        if refused or given["args"][0] != sys.executable:
            raise ValueError(f"{refused or given['args'][0]}: this cannot be forked")
        if orders.is_customized(environment):
            given["preexec_fn"] = orders.end_with_parent if self._ends_with_tests else None
            super()._execute_child(*given.values())  # type: ignore[misc]
            return
        order, descriptors = orders.order_of(given, ends_with_tests=self._ends_with_tests, starts=self._starts)
        server = _server(self._modules, tuple(sorted(orders.read_at_start(environment).items())))
        self.pid, self._status = server.order(order, descriptors)
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in PIPES))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            ended: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return ended
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        with self._status as status:
            return self.pid, orders.number_from(status)

    def _internal_poll(self, *values: Any, **named: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*values, **named)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


@functools.cache
def _server(modules: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> WarmServer:
    return WarmServer(modules, dict(variables))
