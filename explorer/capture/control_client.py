"""What the routes ask of those who run beside them, and how what must run for ever is run."""

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec
import structlog

from tuneloop.shared.errors import TuneloopError


class ShadowReply(msgspec.Struct, frozen=True):
    """What became of a copy: how long the reply took, and how many tokens it has."""

    version: int
    failed: bool
    refused: bool = False
    seconds: float = 0.0
    tokens: int = 0


log = structlog.get_logger()

#: Told when something that must run cannot, such as an engine that dies at start.
OnFailure = Callable[[TuneloopError], None]

Task = Coroutine[Any, Any, None]


class ControlClient(Protocol):
    """What runs beside the requests, in the same process or in another."""

    async def wait_until_flushed(self, timeout_s: float) -> bool:
        """Wait until all that is on disk is in the database; False if that is away, or it is not by then."""

    async def report_shadow_reply(self, reply: ShadowReply) -> None:
        """Hear what became of the copy of a request, for those who decide about the version that it went to."""

    async def exposition(self) -> bytes:
        """The metrics of the whole service."""


async def report(task: Task, on_failure: OnFailure) -> None:
    """Run what must run for ever, and tell if it cannot."""
    try:
        await task
    except TuneloopError as error:
        on_failure(error)
    except Exception as error:
        # A bug. Its task is gone, so go down and be started again rather than go on without it.
        log.exception("task_failed")
        on_failure(TuneloopError(f"an internal error: {error!r}"))
