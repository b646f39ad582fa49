"""What is told to whoever forks a Python command, and how a forked process becomes what it was told to be."""

import array
import ctypes
import fcntl
import functools
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1

#: The length of the order that follows. With it come the descriptors that the process is to have, and where its pid
#: goes, and its status.
_HEAD = struct.Struct("<I")
NUMBER = struct.Struct("<i")

#: How many descriptors come with an order at most, and above which number none of them is to be.
_MOST_DESCRIPTORS, _HIGH = 64, 256

#: How a Python that is started answers signals.
_HANDLERS = {
    signal.SIGCHLD: signal.SIG_DFL,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}

#: Modules that start Pythons of ours.
_STARTING = ("tuneloop.explorer", "tuneloop.trainer")

#: What tune() starts, and how.
SERVICES_OF_TUNE = "tuneloop run"
_RUN = ("-P", "-c", "from tuneloop.cli.main import main; main()", "run")

_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)

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

#: One that customizes a Python for good: what is forked of it has the clock that its own variables say.
_CLOCK = Path(__file__).parents[1] / "set_clock"

#: Those of Python that a forked process obeys as a started one does.
_OBEYED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")


def is_read_at_start(name: str) -> bool:
    return name.startswith(_READ_AT_START)


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment only a Python that starts with it knows."""
    obeyed = _OBEYED if _CLOCK not in _customizing(environment) else _OBEYED[1:]
    return {
        name: value for name, value in environment.items() if value and is_read_at_start(name) and name not in obeyed
    }


def is_customized(environment: Mapping[str, str]) -> bool:
    """Whether a Python that is started imports a module of a test's before anything else."""
    return any(each != _CLOCK for each in _customizing(environment))


def _customizing(environment: Mapping[str, str]) -> list[Path]:
    folders = [Path(each) for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    return [each for each in folders if (each / "sitecustomize.py").is_file()]


def module_of(command: Sequence[str]) -> str | None:
    """The module that a Python command runs, with -P or without; `tuneloop run` has none."""
    if tuple(command[:5]) == (sys.executable, *_RUN):
        return SERVICES_OF_TUNE
    words = [word for word in command[:4] if word != "-P"]
    return words[2] if len(words) > 2 and words[:2] == [sys.executable, "-m"] else None


def order_of(
    given: Mapping[str, Any], *, ends_with_tests: bool = False, starts: bool = False
) -> tuple[dict[str, Any], list[int]]:
    """The order for what subprocess.Popen was given, and the descriptors that go with it."""
    streams = (given["p2cread"], given["c2pwrite"], given["errwrite"])
    placed = {own: own if each == -1 else each for own, each in enumerate(streams)}
    placed |= {each: each for each in given["pass_fds"]}
    environment = os.environ if given["env"] is None else given["env"]
    order = {
        "command": [os.fsdecode(word) for word in given["args"]],
        "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
        "folder": os.path.abspath(given["cwd"] or "."),
        "start_new_session": given["start_new_session"],
        "process_group": given["process_group"] if given["process_group"] != -1 else None,
        "umask": _umask() if given["umask"] == -1 else given["umask"],
        "limits": [resource.getrlimit(each) for each in _LIMITS],
        "ends_with_tests": ends_with_tests,
        "starts": starts or module_of(given["args"]) in _STARTING,
        "before": _spell(given["preexec_fn"]),
        "numbers": list(placed),
    }
    return order, list(placed.values())


def send(channel: socket.socket, order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    data = json.dumps(order).encode()
    socket.send_fds(channel, [_HEAD.pack(len(data))], list(descriptors))
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next order and its descriptors, the last of which says how it goes; None once there is nobody to give any."""
    space = socket.CMSG_LEN(_MOST_DESCRIPTORS * array.array("i").itemsize)
    head, ancillary, _, _ = channel.recvmsg(_HEAD.size, space, socket.MSG_WAITALL)
    if len(head) < _HEAD.size:
        return None
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    (size,) = _HEAD.unpack(head)
    order = b""
    while len(order) < size:
        order += channel.recv(size - len(order))
    return json.loads(order), list(descriptors)


def number_from(channel: socket.socket) -> int:
    """The next number that comes: a pid, or how it ended."""
    data = channel.recv(NUMBER.size, socket.MSG_WAITALL)
    if len(data) < NUMBER.size:
        raise RuntimeError("the process that commands are forked from is gone")
    return int(NUMBER.unpack(data)[0])


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def take_up(order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Make this process what its starter asked for."""
    signal.set_wakeup_fd(-1)
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)
    _place(descriptors, order["numbers"])
    if order["start_new_session"]:
        os.setsid()
    if order["process_group"] is not None:
        os.setpgid(0, order["process_group"])
    if order["ends_with_tests"]:
        end_with_parent()
    for kind, limits in zip(_LIMITS, order["limits"], strict=True):
        resource.setrlimit(kind, limits)
    os.umask(order["umask"])
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    name(order["command"])
    if order["before"] is not None:
        module, function, arguments = order["before"]
        getattr(importlib.import_module(module), function)(*arguments)


def name(command: Sequence[str]) -> None:
    """Be called by this command in /proc, as far as our own was as long."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    words = b"".join(word.encode() + b"\0" for word in command)[: end - start - 1]
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(words.ljust(end - start, b"\0"))


def can_be_spelled(before: Any) -> bool:
    """Whether what is to be called before the command can be called in a process that is forked from another."""
    return before is None or isinstance(before, functools.partial)


def _spell(before: "functools.partial[None] | None") -> tuple[str, str, tuple[Any, ...]] | None:
    return before and (before.func.__module__, before.func.__name__, before.args)


def out_of_the_way(descriptor: int) -> int:
    """The same under a number that no process is to find anything under."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(descriptor)
    return high


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Have descriptors under the numbers that the process is to find them under."""
    for each, number in zip([out_of_the_way(each) for each in descriptors], numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def _umask() -> int:
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("Umask:")]
    return int(line.split()[1], 8)
