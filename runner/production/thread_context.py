"""Lets threads and executors that a shadow run starts belong to it: Python gives them an empty context."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import Any, cast

from tuneloop.runner.production.call_context import current, in_context

_installing = threading.Lock()


def carry_into_threads(is_carried: Callable[[object], bool]) -> None:
    """From now on, what `is_carried` of a context is that of the threads and executor calls that are begun in it too.

    Where nothing is to be carried, as in production, they begin as ever.
    """
    with _installing:
        if getattr(threading.Thread.start, "_carries", False):
            return
        start, submit = threading.Thread.start, cast(Callable[..., Future[Any]], ThreadPoolExecutor.submit)

        @wraps(start)
        def start_within(thread: threading.Thread) -> None:
            if is_carried(what := current()):
                # Not a wrapper of the target: subclasses have a `run` of their own.
                vars(thread)["run"] = _within(what, thread.run)
            start(thread)

        @wraps(submit)
        def submit_within(pool: ThreadPoolExecutor, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            if not is_carried(what := current()):
                return submit(pool, function, *args, **kwargs)
            # A thread that the pool starts for this call outlives it, and then works for others.
            with in_context(None):
                return submit(pool, _within(what, function), *args, **kwargs)

        vars(start_within)["_carries"] = True
        for owner, name, function in (
            (threading.Thread, "start", start_within),
            (ThreadPoolExecutor, "submit", submit_within),
        ):
            setattr(owner, name, function)


def _within(what: object, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with in_context(what):
            return function(*args, **kwargs)

    return call
