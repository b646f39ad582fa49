"""How much more several processes record together than one does, and the same of feedback, as explorers' drains do it.

All have one PostgreSQL database. Rounds of one process and of all take turns, so that noise hits both.
"""

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import msgspec

from benchmarks.databases import Databases
from benchmarks.ledger.load import replies
from benchmarks.ledger.recording import DIFFERENT, exchange, with_reply_id
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.shared.experience import Feedback, Record
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database

#: Records in one transaction.
GROUP = 64

_COMPLETION_TOKENS = 64
_AHEAD_S = 0.2


def measure(databases: Databases, processes: int, rounds: int, groups: int) -> list[dict[str, Any]]:
    """One line for each kind of record; a round of a process is so many groups."""
    spawned = multiprocessing.get_context("spawn")
    with databases.fresh() as url:
        database.upgrade(url)
        pipes = []
        for _ in range(processes):
            here, there = spawned.Pipe()
            spawned.Process(target=_record, args=(url, groups, there), daemon=True).start()
            pipes.append(here)
        rates: dict[tuple[str, int], list[float]] = {}
        for number in range(rounds + 1):
            for some in (pipes[:1], pipes)[:: -1 if number % 2 else 1]:
                for kind, rate in _round(some, groups):
                    rates.setdefault((kind, len(some)), []).extend([rate] if number else [])  # the first one warms up
        for pipe in pipes:
            pipe.send(None)
    lines, together = [], {}
    for kind in ("record", "feedback"):
        one, all_ = rates[kind, 1], rates[kind, processes]
        together[kind] = median(many / few for many, few in zip(all_, one, strict=True))
        line = {"database": databases.name, "kind": kind, "processes": processes, "one_per_s": median(one)}
        factors = {"factor": together[kind], "of_records": together[kind] / together["record"]}
        lines.append(line | {"together_per_s": median(all_)} | factors)
    return lines


def _round(pipes: Sequence[Connection], groups: int) -> list[tuple[str, float]]:
    """How many a second all of them did together."""
    found = []
    for kind in ("record", "feedback"):
        for pipe in pipes:
            pipe.send("prepare")
        for pipe in pipes:
            pipe.recv()
        began = time.monotonic() + _AHEAD_S
        for pipe in pipes:
            pipe.send(began)
        ended = max(pipe.recv() for pipe in pipes)
        found.append((kind, len(pipes) * groups * GROUP / (ended - began)))
    return found


def _record(url: str, groups: int, pipe: Connection) -> None:
    ledger = Ledger(database.connect(url))
    pool = [exchange(reply) for reply in replies(DIFFERENT, _COMPLETION_TOKENS)]
    signer, said = ReplyIdSigner(os.urandom(32)), list[Record]()
    while pipe.recv() is not None:
        if said:  # every second time it is feedback about what was recorded the time before
            names = [each.msg_id for each in said]
            records: list[Record] = [_feedback(name) for name in names if name is not None]
            said = []
        else:
            named = (with_reply_id(pool[number % DIFFERENT], signer) for number in range(groups * GROUP))
            said = records = [msgspec.structs.replace(each, run_id=each.msg_id) for each in named]
        pipe.send(None)
        time.sleep(max(0.0, pipe.recv() - time.monotonic()))
        for first in range(0, len(records), GROUP):
            ledger.recording.record(records[first : first + GROUP])
        pipe.send(time.monotonic())
    ledger.close()


def _feedback(msg_id: str) -> Feedback:
    names = {"event_id": f"of-{msg_id}"[:64], "call_id": msg_id[:64]}
    return Feedback(tenant="acme", msg_id=msg_id, choice=None, value=1.0, received_at=time.time(), **names)
