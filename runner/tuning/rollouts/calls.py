"""Calls a user's function, be it async or plain, within a time limit, whatever it does."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

#: Seconds that a cancelled function gets for its `finally`.
_GRACE_S = 5.0


async def call_within(timeout_s: float, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What the function returns. Raises TimeoutError: it is cancelled then, or, in a thread, left to itself."""
    working = asyncio.ensure_future(_call(function, arguments))
    try:
        done, _ = await asyncio.wait({working}, timeout=timeout_s)
        if not done:
            raise TimeoutError(f"not done after {timeout_s:g} s")
        if working.cancelled():  # not by us: as it is, it would look like the end of the whole call
            raise RuntimeError("it was cancelled from within: it raised CancelledError")
        return working.result()
    finally:
        if not working.done():
            working.cancel()
            await asyncio.wait({working}, timeout=_GRACE_S)
            if not working.done():
                # It catches what cancels it: the event loop's end would wait for it for ever.
                asyncio._unregister_task(working)


async def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return await _call_either(function, arguments)
    except (Exception, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # such as SystemExit, which would end the event loop, and all other runs with it
        raise RuntimeError(f"it ended with {error!r}") from error


async def _call_either(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    called = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is async
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        return await function(**arguments)
    returned = await in_daemon_thread(lambda: function(**arguments))
    return await returned if inspect.isawaitable(returned) else returned


def in_daemon_thread(work: Callable[[], Any]) -> Awaitable[Any]:
    """What the work returns, done in a thread of its own: one that hangs keeps neither others nor our end waiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = context.run(work)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the result
            failure = RuntimeError("StopIteration") if isinstance(error, StopIteration) else error
        with suppress(RuntimeError):  # The loop was closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True, name="tuneloop-run").start()
    return future
