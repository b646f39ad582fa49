"""What the tests of retention and of erasure share: rows of every state, at a time of their own."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, select

from tests.factories import committed, exchange, experience, ids, published, rewarded
from tuneloop.shared.experience import Exchange, State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.schema import erasures, exchanges, experiences, exports, feedback, versions

NOW = 1e9
OLD = NOW - 100
EVERYTHING = dict.fromkeys((State.RECORDED, State.REWARDED, State.TRAINED, State.EXPIRED, State.DROPPED), 50.0)


def everything(engine: Engine) -> dict[str, list[Any]]:
    tables = (exchanges, experiences, feedback, versions, erasures, exports)
    with engine.connect() as connection:
        return {table.name: sorted(map(tuple, connection.execute(select(table))), key=str) for table in tables}


def column(engine: Engine, which: Any) -> list[Any]:
    with engine.connect() as connection:
        return sorted(connection.execute(select(which)).scalars())


def trained(ledger: Ledger, count: int = 1, **but: Any) -> list[Exchange]:
    said = committed(ledger, count, **but)
    epoch = ledger.training.take_epoch("trainer")
    ledger.training.register(epoch, ids(ledger.training.lease(epoch, count, BatchRules())), step=1, publish=published)
    return said


def recorded(ledger: Ledger, **but: Any) -> None:
    ledger.recording.record([exchange(**but)])


def dropped(ledger: Ledger, **but: Any) -> None:
    ledger.recording.record([exchange(experiences=(experience(drop_reason="cut off"),), **but)])


def expired(ledger: Ledger, **but: Any) -> None:
    committed(ledger, 1, **but)
    ledger.training.lease(ledger.training.take_epoch("trainer"), 1, BatchRules(max_staleness=-1))


def in_work(ledger: Ledger, **but: Any) -> None:
    committed(ledger, 1, **but)
    epoch = ledger.training.take_epoch("trainer")
    ledger.training.lease(epoch, 1, BatchRules())
    committed(ledger, 1, **but)


IN_STATE: dict[State, Callable[..., Any]] = {
    State.RECORDED: recorded,
    State.TRAINED: trained,
    State.EXPIRED: expired,
    State.DROPPED: dropped,
    State.REWARDED: lambda ledger, **but: rewarded(ledger, 1, **but),  # last: the others commit all that there are
}
