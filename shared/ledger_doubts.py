"""What an engine said that had other weights than it should have had. Runs inside a transaction of the ledger."""

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from shared.experience import HELD_OUT, Exchange, Experience
from shared.schema import mismatches

#: Why what such an engine sampled is not trained on.
REASON = "engine_mismatch"


def trustworthy(connection: Connection, said: Sequence[Exchange]) -> list[Exchange]:
    """The exchanges, those marked that an engine answered when it was not what it should have been."""
    known = connection.execute(select(mismatches.c.engine, mismatches.c.since, mismatches.c.until)).all()
    if not known:
        return list(said)
    return [_marked(each) if any(_within(each, row) for row in known) else each for each in said]


def _within(exchange: Exchange, row: Any) -> bool:
    same: bool = exchange.engine == row.engine
    return same and exchange.received_at < row.until and exchange.received_at + exchange.latency_s >= row.since


def _marked(exchange: Exchange) -> Exchange:
    return msgspec.structs.replace(exchange, experiences=tuple(map(_dropped, exchange.experiences)))


def _dropped(experience: Experience) -> Experience:
    known = experience.drop_reason if experience.drop_reason != HELD_OUT else None
    return msgspec.structs.replace(experience, drop_reason=known or REASON)
