"""How long the trainer's claim of a batch takes with few and with many committed experiences waiting, in each order.

What is claimed is of a real size; what waits beside it has only a few tokens, or a million rows would be gigabytes.
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from sqlalchemy import Engine, update

from benchmarks.databases import Databases, connect
from benchmarks.ledger.load import replies
from benchmarks.ledger.recording import DIFFERENT, exchange
from tests.factories import fill
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.storage.codec import to_blob
from tuneloop.shared.ledger.storage.schema import experiences

BATCH = 512
ORDERS = ("oldest", "freshest", "priority")

_COMPLETION_TOKENS = 64


def measure(databases: Databases, depths: Sequence[int], claims: int) -> list[dict[str, Any]]:
    """One line for each order and number of rows that wait; the ratio is to the first number's."""
    lines: list[dict[str, Any]] = []
    firsts: dict[str, float] = {}
    for waiting in depths:
        with databases.fresh() as url:
            taken = _claim(url, waiting, claims)
        for order, seconds in taken.items():
            middle = median(seconds) * 1000
            lines.append(
                {
                    "database": databases.name,
                    "order": order,
                    "waiting": waiting,
                    "claimed": BATCH,
                    "median_ms": middle,
                    "slowest_ms": max(seconds) * 1000,
                    "ratio": middle / firsts.setdefault(order, middle),
                }
            )
    return sorted(lines, key=lambda line: ORDERS.index(line["order"]))


def _claim(url: str, waiting: int, claims: int) -> dict[str, list[float]]:
    database.upgrade(url)
    engine = database.connect(url)
    fill(engine, waiting)
    _make_real(engine, url, waiting)
    ledger = Ledger(engine)
    epoch = ledger.training.take_epoch("benchmark")
    taken: dict[str, list[float]] = {order: [] for order in ORDERS}
    for _ in range(claims):
        for order, seconds in taken.items():
            started = time.perf_counter()
            samples = ledger.training.lease(epoch, BATCH, BatchRules(order=order))
            seconds.append(time.perf_counter() - started)
            if len(samples) != BATCH:
                raise AssertionError(f"{len(samples)} of {BATCH} were claimed")
            _give_back(engine)
    ledger.close()
    return taken


def _give_back(engine: Engine) -> None:
    """Bypasses the ledger, which would look for feedback that these rows never had."""
    waiting = {"state": State.COMMITTED, "lease_epoch": None, "lease_until": None}
    with engine.begin() as connection:
        connection.execute(update(experiences).where(experiences.c.state == State.LEASED).values(waiting))


def _make_real(engine: Engine, url: str, waiting: int) -> None:
    """Give claimed rows their tokens, and let the database vacuum in time."""
    blobs = [to_blob(exchange(reply).experiences[0]) for reply in replies(DIFFERENT, _COMPLETION_TOKENS)]
    with engine.begin() as connection:
        for number in {*range(1, BATCH + 1), *range(waiting - BATCH + 1, waiting + 1)}:
            statement = update(experiences).where(experiences.c.id == number)
            connection.execute(statement.values(blob=blobs[number % len(blobs)]))
    care = "VACUUM ANALYZE" if engine.dialect.name == "postgresql" else "PRAGMA wal_checkpoint(TRUNCATE)"
    with connect(url) as connection:
        connection.exec_driver_sql(care)
