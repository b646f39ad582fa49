"""What the page, the gauges, doctor and purge ask, with few and with many exchanges in the ledger.

The few are recorded, rewarded, committed and trained through the ledger; the many are copies of their rows.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import Connection

from benchmarks.databases import Databases, connect
from tests.factories import committed, exchange, experience, published, rewarded
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.storage.counters import FOLD
from tuneloop.shared.ledger.storage.schema import metadata
from tuneloop.shared.operations.doctor import MAX_DROP_REASONS

_BASE, _VERSIONS, _BATCH = 8_000, 8, 640
#: What copies must not share with their original.
_NAMES = ("msg_id", "event_id", "other_msg_id")


def measure(databases: Databases, exchanges: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """One line per question, with the milliseconds at each number of exchanges; the ratio is last to first."""
    found: dict[str, dict[int, float]] = {}
    for count in exchanges:
        with databases.fresh() as url:
            for question, seconds in _ask(url, count // _BASE, rounds).items():
                found.setdefault(question, {})[count] = 1000 * median(seconds)
    return [
        {"database": databases.name, "question": question}
        | {f"ms_at_{count}": each for count, each in at.items()}
        | {"ratio": at[exchanges[-1]] / at[exchanges[0]]}
        for question, at in found.items()
    ]


def _ask(url: str, copies: int, rounds: int) -> dict[str, list[float]]:
    database.upgrade(url)
    engine = database.connect(url)
    ledger = Ledger(engine)
    _fill(ledger)
    with connect(url) as connection:
        _copy(connection, copies)
    policy = BatchRules()
    questions: dict[str, Callable[[], object]] = {
        "counts": ledger.reports.counts,
        "counts of a tenant": lambda: ledger.reports.counts("acme"),
        "facts": lambda: ledger.reports.facts(policy, batch=32),
        "facts with reasons": lambda: ledger.reports.facts(policy, drops=MAX_DROP_REASONS, batch=32),
        "rewards": ledger.reports.rewards,
        "imbalance": ledger.reports.imbalance,
        "fold": ledger.reports.fold_counts,
        "audit": ledger.reports.audit,
        "doctor with its start": lambda: _doctor(url),
        "purge, dry run": lambda: ledger.retention.purge({state: 0.0 for state in (State.TRAINED,)}, dry_run=True),
        "record 64": lambda: ledger.recording.record([exchange() for _ in range(64)]),
        "feedback 64": lambda: rewarded(ledger, 64),
    }
    taken: dict[str, list[float]] = {question: [] for question in questions}
    for _ in range(rounds):
        for question, ask in questions.items():
            started = time.perf_counter()
            answer = ask()
            taken[question].append(time.perf_counter() - started)
            if question in {"imbalance", "audit"} and answer:
                raise AssertionError(answer)
    ledger.close()
    return taken


def _doctor(url: str) -> None:
    with tempfile.TemporaryDirectory(prefix="tl-doctor-") as folder:
        buffer = {"name": "public", "path": url}
        settings = {"mode": "train", "checkpoint_root_dir": folder, "model": {"model_path": folder}}
        path = Path(folder, "settings.yaml")
        path.write_text(json.dumps(settings | {"buffer": {"trainer_input": {"experience_buffer": buffer}}}))
        command = [sys.executable, "-c", "from tuneloop.cli.main import main; main()", "doctor", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _fill(ledger: Ledger) -> None:
    epoch = ledger.training.take_epoch("benchmark")
    for version in range(_VERSIONS):
        committed(ledger, _BATCH, experiences=(experience(version_min=version, version_max=version),))
        samples = ledger.training.lease(epoch, _BATCH, BatchRules())
        ledger.training.register(epoch, [each.id for each in samples], step=version + 1, publish=published)
    dropped = (experience(drop_reason="cut_off"),)
    for but in ({}, {}, {}, {"experiences": dropped}):  # type: dict[str, Any]
        ledger.recording.record([exchange(**but) for _ in range((_BASE - _VERSIONS * _BATCH) // 4)])


def _copy(connection: Connection, copies: int) -> None:
    """Add `copies` - 1 of all rows of what grows; the oldest first, as they would have come in."""
    numbers = (
        f"(WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {copies - 1}) SELECT i FROM n)"
    )
    for name in ("exchanges", "tags", "experiences", "feedback") if copies > 1 else ():
        columns = [each.name for each in metadata.tables[name].columns if each.name != "id"]
        values = (f"{each} || '-' || i" if each in _NAMES else each for each in columns)
        quoted = ", ".join(columns)
        connection.exec_driver_sql(f"INSERT INTO {name} ({quoted}) SELECT {', '.join(values)} FROM {numbers} k, {name}")
    connection.exec_driver_sql(f"UPDATE versions SET consumed = consumed * {copies}")
    if connection.dialect.name == "postgresql":
        connection.execute(FOLD)
        connection.exec_driver_sql("VACUUM ANALYZE")
    else:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
