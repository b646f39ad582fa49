"""Runs what the explorer does beside the requests: one loop for every periodic task, and one way for a task to fail."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

import structlog

from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import LedgerUnavailable, StartupError, TuneloopError

log = structlog.get_logger()

#: Called when a task that the service needs has ended with an error, such as an engine that dies at start.
OnFailure = Callable[[TuneloopError], None]

Task = Coroutine[Any, Any, None]

#: One turn of a periodic task. It may return the seconds until the next one; None: as usual.
Turn = Callable[[], Awaitable[float | None]]


async def every(seconds: float, turn: Turn, *, task: str, metrics: Metrics) -> NoReturn:
    """Run `turn` every `seconds` until cancelled. Its errors are logged and counted; StartupError alone ends it."""
    failures = metrics.background_failures.labels(task)
    away = False
    while True:
        pause_s: float | None = None
        try:
            pause_s = await turn()
        except LedgerUnavailable as error:
            if not away:
                log.warning("database_away", task=task, reason=str(error))
            away = True
        except StartupError:
            raise
        except Exception:
            log.exception("background_task_failed", task=task)
            failures.inc()
        else:
            if away:
                log.info("database_back", task=task)
            away = False
        await asyncio.sleep(seconds if pause_s is None else pause_s)


async def run_task(task: Task, on_failure: OnFailure) -> None:
    try:
        await task
    except TuneloopError as error:
        on_failure(error)
    except Exception as error:
        # A bug. Its task is gone, so go down and be started again rather than go on without it.
        log.exception("task_failed")
        on_failure(TuneloopError(f"an internal error: {error!r}"))


#: Full collections are rare then; what a reply or a record is made of is freed by its references' counts.
_THRESHOLD = (20_000, 20, 20)


def freeze_garbage() -> None:
    """Look no more through what this process has opened and imported until now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLD)
