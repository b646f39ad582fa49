"""The lock of those who write to a SQLite file: nobody waits long behind one that never rests."""

import multiprocessing
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from sqlalchemy import text

from tuneloop.shared.errors import LedgerUnavailable
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.transactions import Transactions
from tuneloop.shared.ledger.storage.write_lock import WriteLock, writing_to

HELD_S = 0.02


class Counter(Transactions):
    """A way to a table of one column."""

    def make(self) -> None:
        with self.write() as connection:
            connection.execute(text("CREATE TABLE counted (who TEXT)"))

    def add(self, who: str, held_s: float = 0.0) -> None:
        with self.write() as connection:
            connection.execute(text("INSERT INTO counted VALUES (:who)"), {"who": who})
            time.sleep(held_s)

    def count(self, who: str) -> int:
        return int(self.read(text("SELECT count(*) FROM counted WHERE who = :who").bindparams(who=who))[0][0])


def counter(file: Path) -> Counter:
    return Counter(connect(f"sqlite:///{file}"))


def write_without_rest(file: Path, stop: Event) -> None:
    busy = counter(file)
    while not stop.is_set():
        busy.add("busy", HELD_S)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_who_writes_now_and_then_waits_for_few_others(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "a.db"
    ours = counter(file)
    ours.make()
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    make = threading.Thread if kind == "thread" else context.Process
    others = [make(target=write_without_rest, args=(file, stop)) for _ in range(2)]
    for each in others:
        each.start()
    try:
        while ours.count("busy") < 2:
            time.sleep(0.01)
        began = ours.count("busy")
        for _ in range(10):
            ours.add("ours")
        # One of each that was waiting already, and what a loaded machine adds.
        assert ours.count("busy") - began < 10 * len(others) * 3
    finally:
        stop.set()
        for each in others:
            each.join()
        ours.close()


def test_threads_that_wait_too_long_are_told(tmp_path: Path) -> None:
    lock = WriteLock(str(tmp_path / "a.db"), patience_s=0.05)
    told: list[str] = []

    def wait() -> None:
        try:
            with lock.hold():
                told.append("held")
        except LedgerUnavailable as error:
            told.append(str(error))

    with lock.hold():
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join()
    assert told == ["others have been writing to the database for 0.05 s"]
    wait()
    assert told[1:] == ["held"]


def test_a_process_that_never_ends_its_writing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    stopped, ours = WriteLock(str(tmp_path / "a.db")), WriteLock(str(tmp_path / "a.db"), patience_s=0.05)
    with stopped.hold():
        for _ in range(2):  # what was held on the way is given back
            with (
                pytest.raises(LedgerUnavailable, match=r"others have been writing to the database for 0\.05 s"),
                ours.hold(),
            ):
                pass
        other = WriteLock(str(tmp_path / "a.db"), patience_s=0.05)
        with pytest.raises(LedgerUnavailable), other.hold():
            pass
    with other.hold():
        pass


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    lock, other = (WriteLock(str(tmp_path / "a.db")) for _ in range(2))
    with pytest.raises(FileNotFoundError, match="checkpoint"), lock.hold():
        raise FileNotFoundError("checkpoint")
    with lock.hold():
        pass
    with other.hold():
        pass


def test_a_folder_that_is_gone_is_the_database_away(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable, match="No such file"), WriteLock(str(tmp_path / "gone" / "a.db")).hold():
        pass


def test_postgresql_needs_none() -> None:
    engine = connect("postgresql://nobody@127.0.0.1:1/none")
    with writing_to(engine)(), writing_to(engine)():
        pass
