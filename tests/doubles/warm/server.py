"""Forks Python commands from a process that has imported what they need: the other side of `process`.

    python -P tests/doubles/warm/server.py DESCRIPTOR MODULES PADDING

A child runs the command as a fresh Python would, and is named in /proc by it. Imports apart, what differs is that they
are there before the command asks for them, and that the child's parent is this process.
"""

import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.doubles.warm import orders
from tests.doubles.warm.template import become


class Server:
    """Takes orders from one client, and tells it of each child's end."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._children: dict[int, socket.socket] = {}

    def serve(self) -> list[str] | None:
        """Serve until the client is gone; in a child, the command that it is to run."""
        woken, waking = socket.socketpair()
        waking.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        while True:
            readable, _, _ = select.select([self._client, woken], [], [])
            if woken in readable:
                woken.recv(4096)
                self._reap()
            if self._client in readable:
                taken = orders.receive(self._client)
                if taken is None:
                    return None
                order, descriptors = taken
                if not self._fork(descriptors):
                    for each in (woken, waking, self._client, *self._children.values()):
                        each.close()
                    return become(order, descriptors[:-1])

    def _fork(self, descriptors: Sequence[int]) -> int:
        pid = os.fork()
        if not pid:
            os.close(descriptors[-1])
        else:
            status = socket.socket(fileno=descriptors[-1])
            for each in descriptors[:-1]:
                os.close(each)
            self._children[pid] = status
            status.send(orders.NUMBER.pack(pid))
        return pid

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with self._children.pop(pid) as told, suppress(OSError):  # nobody waits for it any more
                told.send(orders.NUMBER.pack(status))


def run(command: Sequence[str]) -> None:
    """Run what follows the interpreter's name: -P, -m and a module or -c and code or a file, and arguments."""
    sys.orig_argv = list(command)
    words = list(command[1:])
    safe = words[0] == "-P"
    if safe:
        del words[0]
    how, what, *arguments = words if words[0] in ("-m", "-c") else ("", *words)
    paths = [] if safe else [{"-m": os.getcwd(), "-c": ""}.get(how, os.path.dirname(what))]
    sys.path[:0] = [*paths, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    if how == "-m":
        sys.argv = [what, *arguments]
        if not hasattr(sys.modules.get(what), "__path__"):
            sys.modules.pop(what, None)  # it runs anew, with its imports there
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)  # noqa: S102
    else:
        sys.argv = [what, *arguments]
        runpy.run_path(what, run_name="__main__")


def serve(descriptor: int, modules: Sequence[str]) -> list[str] | None:
    """Import the modules, and fork for whom is at the descriptor; in a child, the command to run."""
    orders.end_with_parent(signal.SIGKILL)
    for module in modules:
        importlib.import_module(module)
        if module.endswith(".__main__"):
            del sys.modules[module]
    if threading.active_count() > 1:  # those of OpenBLAS are made anew in a child
        raise SystemExit(f"one of {modules} has started a thread: nothing can be forked")
    gc.collect()
    gc.freeze()
    return Server(socket.socket(fileno=descriptor)).serve()


if __name__ == "__main__":
    _command = serve(int(sys.argv[1]), sys.argv[2].split(","))
    del sys.path[0]
    if _command is not None:
        run(_command)
