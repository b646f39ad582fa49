"""What the outbox of an explorer holds that the database has not taken."""

from typing import NamedTuple


class OutboxStatus(NamedTuple):
    """The state of an outbox: so many `records` and `bytes` wait for the database, the oldest of them `since` then.

    `refused_records` are in the database, aside. `refusal` is why the database takes nothing although it answers.
    """

    files: int = 0
    records: int = 0
    bytes: int = 0
    since: float | None = None
    refused_records: int = 0
    refusal: str | None = None
