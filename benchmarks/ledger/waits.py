"""How long writers to SQLite that never rest wait for each other: by the ledger's lock, and by SQLite's own alone.

    .venv/bin/python -m benchmarks.ledger.waits [--writers 6] [--seconds 25] [--rounds 2]

Each writer is a process that inserts a row of 2 kB, one transaction after the other (synchronous=FULL). A wait is the
time from wanting to write to having written.
"""

import argparse
import multiprocessing
import tempfile
import time
from contextlib import nullcontext
from multiprocessing.queues import Queue
from pathlib import Path

from sqlalchemy import text

from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.transactions import Transactions

_ROW = bytes(2000)


class Writer(Transactions):
    """A way to a table of rows."""

    def __init__(self, file: Path, *, by_lock: bool) -> None:
        super().__init__(connect(f"sqlite:///{file}"))
        if not by_lock:
            self._turn = nullcontext

    def make(self) -> None:
        """Make the table."""
        with self.write() as connection:
            connection.execute(text("CREATE TABLE written (row BLOB)"))

    def insert(self) -> None:
        """Write once."""
        with self.write() as connection:
            connection.execute(text("INSERT INTO written VALUES (:row)"), {"row": _ROW})


def main() -> int:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger.waits", description=__doc__)
    parser.add_argument("--writers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    print("| waits by | round | transactions/s | fewest and most of a writer | 99 %, ms | longest, s |")
    print("|---|---|---|---|---|---|")
    for number in range(options.rounds):
        for by_lock in (False, True):
            waits = _measure(options.writers, options.seconds, by_lock=by_lock)
            every, counts = sorted(wait for each in waits for wait in each), sorted(map(len, waits))
            print(
                f"| {'the lock' if by_lock else 'SQLite alone'} | {number + 1} | {len(every) / options.seconds:.0f} | "
                f"{counts[0]}, {counts[-1]} | {1000 * every[int(0.99 * len(every))]:.0f} | {every[-1]:.2f} |",
                flush=True,
            )
    return 0


def _measure(writers: int, seconds: float, *, by_lock: bool) -> list[list[float]]:
    """The waits of each writer, in seconds."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="waits-") as folder:
        file, waits = Path(folder) / "a.db", context.Queue()
        Writer(file, by_lock=by_lock).make()
        until = time.time() + 5.0 + seconds  # the first five are for starting
        processes = [
            context.Process(target=_write, args=(file, until, seconds, by_lock, waits)) for _ in range(writers)
        ]
        for each in processes:
            each.start()
        found = [waits.get() for _ in processes]
        for each in processes:
            each.join()
    return found


def _write(file: Path, until: float, seconds: float, by_lock: bool, waits: "Queue[list[float]]") -> None:
    writer, seen = Writer(file, by_lock=by_lock), list[float]()
    while (began := time.time()) < until:
        writer.insert()
        if began > until - seconds:
            seen.append(time.time() - began)
    waits.put(seen)


if __name__ == "__main__":
    raise SystemExit(main())
