"""What the request handlers need from the control process."""

from enum import IntEnum
from typing import Protocol

import msgspec

from tuneloop.explorer.access.feedback_tokens import FeedbackBinding


class ShadowReply(msgspec.Struct, frozen=True):
    """What became of a copy: how long the reply took, and how many tokens it has."""

    version: int
    failed: bool
    refused: bool = False
    seconds: float = 0.0
    tokens: int = 0


class Flushed(IntEnum):
    """What of that which was on disk is in the database: not all that was asked for, all of that, all of the tenant's.

    Who asked for a tenant's, or for everybody's, gets the last.
    """

    NO = 0
    ASKED = 1
    ALL = 2


class FlushTarget(msgspec.Struct, frozen=True):
    """What is waited for until it is in the database: all, or what is a tenant's, or a key's of it.

    `asker` is the name of the key that asks. With `rewards_only`, of other keys only what affects rewards is meant:
    feedback, and replies of runs.
    """

    tenant: str | None = None
    key: str | None = None
    asker: str = ""
    rewards_only: bool = False


EVERYTHING = FlushTarget()


class ControlClient(Protocol):
    """What runs beside the requests, in the same process or in another."""

    async def wait_until_flushed(self, timeout_s: float, target: FlushTarget = EVERYTHING) -> Flushed:
        """Wait until what is on disk of the target is in the database. NO if it is not by then, or away."""

    async def take_of_token(self, binding: FeedbackBinding, count: int) -> bool:
        """Count events that a browser's token brings, to any worker; False, and none, if it allows less."""

    async def report_shadow_reply(self, reply: ShadowReply) -> None:
        """Hear what became of the copy of a request, for those who decide about the version that it went to."""

    async def exposition(self) -> bytes:
        """The metrics of the whole service."""
