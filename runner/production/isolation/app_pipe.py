"""Messages between an app and the process of its shadow runs: pickles, each behind its length.

Functions and classes travel by name. Those of the module that was started (`python -m app`) have its importable name.
"""

import io
import pickle  # noqa: TID251 - of a pipe between an app and its own child, and nothing that is kept
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from importlib import import_module
from types import FunctionType
from typing import Any, BinaryIO

_LENGTH = struct.Struct(">Q")


class CannotSend(Exception):
    """Something cannot be had in another process; the text says what, and why."""


class RemoteTraceback(Exception):
    """Where an error comes from that was raised in the other process."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def dumps(thing: object) -> bytes:
    """Raises CannotSend."""
    written = io.BytesIO()
    try:
        _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(thing)
    except Exception as error:
        raise CannotSend(f"{type(error).__name__}: {error}") from error
    return written.getvalue()


def loads(data: bytes) -> Any:
    """What was written; raises whatever its modules raise when they are imported."""
    return _Unpickler(io.BytesIO(data)).load()


class Line:
    """One end of a connection, whose messages are written by any thread and read by one."""

    def __init__(self, inbox: BinaryIO, outbox: BinaryIO) -> None:
        self._inbox, self._outbox, self._lock = inbox, outbox, threading.Lock()

    def send(self, thing: object) -> None:
        """Raises CannotSend, or OSError if nobody is there."""
        data = dumps(thing)
        with self._lock:
            self._outbox.write(_LENGTH.pack(len(data)) + data)
            self._outbox.flush()

    def receive(self) -> Any:
        """The next message. Raises EOFError at the end."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return loads(self._read(length))

    def _read(self, length: int) -> bytes:
        data = self._inbox.read(length)
        if len(data) < length:
            raise EOFError
        return data

    def end(self, timeout: float) -> bool:
        """Let the other end read the end; False if it reads nothing, so that a message waits for longer than that."""
        if not self._lock.acquire(timeout=timeout):
            return False
        try:
            with suppress(OSError):
                self._outbox.close()
        finally:
            self._lock.release()
        return True

    def close(self, timeout: float) -> None:
        """End it, and read no more."""
        self.end(timeout)
        self._inbox.close()


def pack_error(error: BaseException) -> tuple[bytes, str]:
    """An error with its traceback, or what says as much where it cannot travel."""
    text = "".join(traceback.format_exception(error))
    try:
        packed = dumps(error)
        loads(packed)  # many classes of errors can be written, and not read
    except Exception:  # noqa: BLE001 - any class may refuse in its own way
        packed = dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed, text


def unpack_error(packed: bytes, text: str) -> Exception:
    """The error, whose cause says where it came from."""
    error = loads(packed)
    found = error if isinstance(error, Exception) else RuntimeError(repr(error))
    found.__cause__ = RemoteTraceback(text)
    return found


def _started_module() -> str | None:
    """The name by which the module that was started can be imported, if it can."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = getattr(spec, "name", None)
    return None if name is None or name.endswith("__main__") else str(name)


def _look_up(module: str, path: str) -> Any:
    here = sys.modules["__main__"] if module == _started_module() else import_module(module)
    return reduce(getattr, path.split("."), here)


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, FunctionType | type) or thing.__module__ != "__main__":
            return NotImplemented
        path = thing.__qualname__
        if (module := _started_module()) is None:
            raise pickle.PicklingError(f"{path} is of the script that was started: keep it in a module of its own")
        try:
            known = reduce(getattr, path.split("."), sys.modules["__main__"])
        except AttributeError:
            known = None
        if known is not thing:
            raise pickle.PicklingError(f"{path} cannot be found by its name in {module}")
        found: tuple[Callable[..., Any], tuple[str, str]] = (_look_up, (module, path))
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == _started_module() else module, name)
