"""What tests of the ledger read of its rows, and a reply that is rewarded and committed."""

from typing import Any

from sqlalchemy import Engine, select

from tests.factories import exchange, feedback
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.schema import experiences


def rows(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(select(experiences).order_by(experiences.c.id)))


def rewards(engine: Engine) -> list[float | None]:
    return [row.reward for row in rows(engine)]


def give(ledger: Ledger, *, commit: bool = True, **but: Any) -> str:
    said = exchange(**but)
    ledger.recording.record([said, feedback(msg_id=said.msg_id, tenant=said.tenant)])
    if commit:
        ledger.recording.commit(said.tenant)
    return said.msg_id
