"""Processes that are forked from one which has imported what they need, in place of a Python started for each.

To import an explorer takes a second or two of a processor, a trainer five: more than most tests need of them.
"""

import atexit
import functools
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.doubles.warm.server import DESCRIPTORS, HEAD, NUMBER, end_with_parent

SERVICES = ("tuneloop.explorer.__main__", "tuneloop.explorer.app", "tuneloop.cli.main")
TRAINING = ("tuneloop.trainer.__main__", "tuneloop.trainer.loop")

#: Variables that Python or a library reads when it starts: who has others there is forked from another process.
_READ_AT_START = (
    "LD_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "TZ",
    "LC_",
    "LANG",
    "HF_",
    "TRANSFORMERS_",
    "TORCH",
    "VLLM_",
    "CUDA_",
)

#: Those of Python that a forked process obeys as a started one does.
_OBEYED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")

#: How long a command's name in /proc may be.
_NAME_CHARACTERS = 4096


class WarmServer:
    """The process that they are forked from."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        """It has imported `modules`, and read `variables` when it started."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(_READ_AT_START)}
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
        data = json.dumps(what).encode()
        with theirs, self._lock:
            given = [*descriptors, theirs.fileno()]
            assert len(given) == DESCRIPTORS
            socket.send_fds(self._orders, [HEAD.pack(len(data))], given)
            self._orders.sendall(data)
        return _received(ours), ours


class WarmProcess(subprocess.Popen[Any]):
    """A Python command as a process. Its parent is not the test, which is told of its end all the same."""

    _status: socket.socket | None = None

    def __init__(
        self, command: Sequence[str], *, modules: Sequence[str] = SERVICES, ends_with_tests: bool = False, **but: Any
    ) -> None:
        """`modules` are imported before; `ends_with_tests`: it gets SIGTERM when the tests end; `but` are Popen's."""
        self._modules, self._ends_with_tests = tuple(modules), ends_with_tests
        super().__init__(command, **but)

    def _execute_child(self, *values: Any) -> None:
        given = dict(zip(_PARAMETERS, values, strict=True))
        environment = os.environ if given["env"] is None else given["env"]
        refused = [name for name in ("preexec_fn", "pass_fds", "executable", "shell") if given[name]]
        if refused or given["args"][0] != sys.executable:
            raise ValueError(f"{refused or given['args'][0]}: this cannot be forked")
        if _is_customized(environment):
            given["preexec_fn"] = end_with_parent if self._ends_with_tests else None
            super()._execute_child(*given.values())  # type: ignore[misc]
            return
        order = {
            "command": [os.fsdecode(word) for word in given["args"]],
            "environment": dict(environment),
            "folder": os.path.abspath(given["cwd"] or "."),
            "start_new_session": given["start_new_session"],
            "process_group": given["process_group"] if given["process_group"] != -1 else None,
            "umask": given["umask"] if given["umask"] != -1 else None,
            "ends_with_tests": self._ends_with_tests,
        }
        theirs = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        descriptors = [own if each == -1 else each for own, each in enumerate(theirs)]
        server = _server(self._modules, tuple(sorted(_read_at_start(environment).items())))
        self.pid, self._status = server.order(order, descriptors)
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _PIPES))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            ended: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return ended
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        with self._status as status:
            return self.pid, _received(status)

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


_PARAMETERS = tuple(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


@functools.cache
def _server(modules: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> WarmServer:
    return WarmServer(modules, dict(variables))


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if value and name.startswith(_READ_AT_START) and name not in _OBEYED
    }


def _is_customized(environment: Mapping[str, str]) -> bool:
    """Whether a Python that is started imports a module of somebody's before anything else."""
    folders = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    return any(Path(each, "sitecustomize.py").is_file() for each in folders)


def _received(channel: socket.socket) -> int:
    data = channel.recv(NUMBER.size, socket.MSG_WAITALL)
    if len(data) < NUMBER.size:
        raise RuntimeError("the process that commands are forked from is gone")
    return int(NUMBER.unpack(data)[0])
