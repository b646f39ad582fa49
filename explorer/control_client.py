"""What the request handlers need from the control process."""

from typing import Protocol

import msgspec

from tuneloop.explorer.access.feedback_tokens import FeedbackBinding
from tuneloop.shared.ledger.facts import Standstill


class ShadowReply(msgspec.Struct, frozen=True):
    """What became of a copy: how long the reply took, and how many tokens it has."""

    version: int
    failed: bool
    refused: bool = False
    seconds: float = 0.0
    tokens: int = 0


class ControlClient(Protocol):
    """What runs beside the requests, in the same process or in another."""

    async def wait_until_taken(self, timeout_s: float) -> bool:
        """Wait until all that is on disk now is in the database. False if it is not by then, or away."""

    def wake_drain(self) -> None:
        """Have the outbox looked at now: somebody waits for what became of feedback."""

    async def take_of_token(self, binding: FeedbackBinding, count: int) -> bool:
        """Count events that a browser's token brings, to any worker; False, and none, if it allows less."""

    async def report_shadow_reply(self, reply: ShadowReply) -> None:
        """Hear what became of the copy of a request, for those who decide about the version that it went to."""

    def stops(self) -> tuple[Standstill, ...]:
        """The parts of the service that stand still."""

    async def exposition(self) -> bytes:
        """The metrics of the whole service."""
