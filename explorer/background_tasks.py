"""Runs the explorer's periodic tasks and reports a task that fails."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

import structlog

from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import LedgerUnavailable, StartupError, TuneloopError

log = structlog.get_logger()

#: Called with the error of a required task that has ended, such as an engine that dies at start.
OnFailure = Callable[[TuneloopError], None]

Task = Coroutine[Any, Any, None]

#: One iteration of a periodic task. It may return the seconds until the next iteration; None: the usual interval.
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
        # A bug ended the task. The service stops and is restarted, because it cannot run without the task.
        log.exception("task_failed")
        on_failure(TuneloopError(f"an internal error: {error!r}"))


#: Full collections become rare: reference counts free the objects of replies and records.
_THRESHOLD = (20_000, 20, 20)


def freeze_garbage() -> None:
    """Exclude all objects that exist now from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLD)
