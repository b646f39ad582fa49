"""An event loop of each thread that waits for coroutines: what an agent opens in one call is usable in the next.

The connections of an agent's client belong to the loop in which they were opened. A loop is closed after its thread has
ended, at the latest when the interpreter ends.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")

_runners: dict[threading.Thread, asyncio.Runner] = {}
_lock = threading.Lock()


def run_in_thread_loop(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """The coroutine's result, in this thread's loop. Raises RuntimeError where an event loop runs already."""
    if loop_runs():
        coroutine.close()
        raise RuntimeError("an event loop runs in this thread: await the method that ends in _async")
    return _runner_of_thread().run(coroutine)


def loop_runs() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _runner_of_thread() -> asyncio.Runner:
    thread = threading.current_thread()
    ended = []
    with _lock:
        if thread not in _runners:
            ended = [_runners.pop(each) for each in list(_runners) if not each.is_alive()]
            # A runner that is told how to make its loop leaves the one alone that a program has set for the thread.
            _runners[thread] = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        runner = _runners[thread]
    for each in ended:
        each.close()
    return runner


@atexit.register
def _close_all() -> None:
    while _runners:
        _, runner = _runners.popitem()
        if not runner.get_loop().is_running():  # in a daemon thread
            # From Python 3.12 on no thread begins now, such as the one that would wait for those of `to_thread`: they
            # have ended, and the loop is closed all the same.
            with suppress(RuntimeError):
                runner.close()


def _forget_all() -> None:
    """In a forked child: closed here, or freed, a loop would take its descriptors from the parent's selector."""
    global _lock
    _lock = threading.Lock()
    if _runners:
        import ctypes

        for runner in _runners.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(runner.get_loop()))
        _runners.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_forget_all)
