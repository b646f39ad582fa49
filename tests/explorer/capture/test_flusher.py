import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from tests.doubles.clock import Clock
from tests.explorer.running import eventually
from tests.factories import exchange, feedback
from tuneloop.explorer.capture import spool, spool_slots
from tuneloop.explorer.capture.flusher import GROUP, Flusher
from tuneloop.explorer.capture.intake import PATIENCE_S, RECORD_PATIENCE_S, Patience
from tuneloop.explorer.capture.spool import Spool
from tuneloop.explorer.capture.spool_slots import RemoteSlot, Slots
from tuneloop.shared import spool_format, steady_time
from tuneloop.shared.errors import LedgerError, LedgerForbidden, LedgerUnavailable, RecordRefused, TuneloopError
from tuneloop.shared.experience import Record, encode
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.schema import feedback as feedback_table
from tuneloop.shared.spool_format import Position

See = Callable[[Spool], RemoteSlot]


class Notebook:
    """Stands for the ledger: notes what it is given, may be away, may refuse some."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.tries = 0
        self.away = False
        self.refuses: Callable[[Record], bool] = lambda record: False
        self.error: type[Exception] = LedgerError

    def check_place(self) -> None:
        """It has no file."""

    def record(self, records: Sequence[Record], slots: Sequence[object] = ()) -> None:
        self.tries += 1
        if self.away:
            raise LedgerUnavailable("away\nfor a while")
        if any(self.refuses(each) for each in records):
            raise self.error("no\nnever")
        self.records += records


def slots_of(own: Spool) -> Slots:
    found = Slots(own.folder.parent)
    found.add(own)
    return found


@contextmanager
def flushing(
    own: Spool, recording: object, slots: Slots | None = None, patience: Patience | None = None
) -> Iterator[tuple[Flusher, list[int]]]:
    set_aside: list[int] = []
    flusher = Flusher(
        slots or slots_of(own),
        recording,  # type: ignore[arg-type]
        quarantined=lambda: set_aside.append(1),
        failed=pytest.fail,
        patience=patience or Patience(0.1, 0.1),
    )
    flusher.start()
    try:
        yield flusher, set_aside
    finally:
        flusher.stop()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Spool]:
    found = Spool.open(tmp_path / "spool", sync=False)
    yield found
    found.close()


async def until_caught_up(flusher: Flusher) -> None:
    """The flusher notices only at its next try that the database is back."""
    async with asyncio.timeout(60):
        while not await flusher.wait_until_taken(60):  # noqa: ASYNC110 - it is the flusher's thread that moves on
            await asyncio.sleep(0.02)


async def append(own: Spool, *records: Record) -> Position:
    return await own.append([encode(each) for each in records])


class Broken:
    """A ledger with a bug."""

    def check_place(self) -> None:
        """It has no file."""

    def record(self, _records: Sequence[Record], _slots: Sequence[object]) -> None:
        raise RuntimeError("a bug")


async def test_a_flusher_that_cannot_go_on_says_so(own: Spool) -> None:
    failures: list[TuneloopError] = []
    flusher = Flusher(slots_of(own), Broken(), quarantined=pytest.fail, failed=failures.append)  # type: ignore[arg-type]
    flusher.start()
    await append(own, exchange())
    async with asyncio.timeout(60):
        while not failures:  # noqa: ASYNC110 - another thread fills it
            await asyncio.sleep(0.01)
    flusher.stop()
    assert "a bug" in str(failures[0])


async def test_records_reach_the_ledger_in_their_order(own: Spool) -> None:
    notebook, said = Notebook(), [exchange() for _ in range(2000)]
    with flushing(own, notebook) as (flusher, _):
        await asyncio.gather(*(append(own, each) for each in said))
        assert await flusher.wait_until_taken(60)
    assert notebook.records == said
    assert own.backlog_bytes() == 0


async def test_stopping_while_the_database_is_away_is_quick_and_loses_nothing(tmp_path: Path) -> None:
    notebook, said = Notebook(), [exchange() for _ in range(5)]
    notebook.away = True
    own = Spool.open(tmp_path, sync=False)
    with flushing(own, notebook):
        await append(own, *said)
        await asyncio.sleep(0.3)
        started = time.monotonic()
    own.close()
    assert time.monotonic() - started < 10
    notebook.away = False
    again = Spool.open(tmp_path, sync=False)
    with flushing(again, notebook) as (flusher, _):
        assert await flusher.wait_until_taken(60)
    again.close()
    assert notebook.records == said


async def test_what_a_killed_process_wrote_comes_first_though_its_lock_stays_for_a_while(tmp_path: Path) -> None:
    """A slow disk keeps a process that was killed in the middle of a write."""
    notebook, before, since = Notebook(), feedback(), feedback()
    killed, own = Spool.open(tmp_path, sync=False), Spool.open(tmp_path, sync=False)
    await append(killed, before)
    with flushing(own, notebook) as (flusher, _):
        await append(own, since)
        assert not await flusher.wait_until_taken(0.5)
        assert notebook.records == []
        killed.close()
        assert await flusher.wait_until_taken(60)
    own.close()
    assert notebook.records == [before, since]


async def test_a_long_backlog_does_not_keep_a_stop_waiting_and_is_not_lost(own: Spool) -> None:
    begun, may_go_on, said = threading.Event(), threading.Event(), [exchange() for _ in range(3 * GROUP)]

    class Slow(Notebook):
        def record(self, records: Sequence[Record], slots: Sequence[object] = ()) -> None:
            begun.set()
            assert may_go_on.wait(60)
            super().record(records, slots)

    notebook = Slow()
    await append(own, *said)
    failed = pytest.fail
    flusher = Flusher(slots_of(own), notebook, quarantined=failed, failed=failed, stop_s=0.0)  # type: ignore[arg-type]
    flusher.start()
    assert await asyncio.to_thread(begun.wait, 60)
    stopping = asyncio.create_task(asyncio.to_thread(flusher.stop))
    while not flusher._stop.is_set():  # noqa: ASYNC110 - another thread sets it
        await asyncio.sleep(0.01)
    may_go_on.set()
    await stopping
    assert notebook.records == said[:GROUP]
    with flushing(own, notebook) as (again, _):
        assert await again.wait_until_taken(60)
    assert notebook.records == said


@pytest.mark.parametrize("error", [LedgerError, RecordRefused, ValueError, OverflowError])
async def test_a_refused_record_goes_aside_and_the_others_through(own: Spool, error: type[Exception]) -> None:
    notebook, said = Notebook(), [exchange() for _ in range(9)]
    notebook.refuses, notebook.error = lambda record: record.msg_id == said[4].msg_id, error
    with flushing(own, notebook) as (flusher, set_aside):
        await append(own, *said)
        await until_caught_up(flusher)
    assert notebook.records == said[:4] + said[5:]
    assert set_aside == [1]
    assert _quarantined(own.folder) == [encode(said[4])]


@pytest.mark.parametrize("error", [LedgerForbidden, LedgerError, RecordRefused])
async def test_what_is_refused_for_a_while_goes_in_afterwards(own: Spool, error: type[Exception]) -> None:
    notebook, said = Notebook(), [exchange() for _ in range(9)]
    notebook.refuses, notebook.error = lambda record: True, error
    with flushing(own, notebook, patience=Patience()) as (flusher, set_aside):
        await append(own, *said)
        eventually(lambda: spool_format.refusal_of(own.folder.parent) is not None)
        assert not await flusher.wait_until_taken(1.0)
        notebook.refuses = lambda record: False
        await until_caught_up(flusher)
        assert spool_format.refusal_of(own.folder.parent) is None
    assert (notebook.records, set_aside) == (said, [])


def test_a_refusal_is_waited_out_for_the_documented_time(clock: Clock) -> None:
    patience = Patience(clock=clock)
    for error, longest in ((RecordRefused("no"), RECORD_PATIENCE_S), (LedgerError("why"), PATIENCE_S)):
        assert patience.waits(error)
        clock.now += longest - 0.1
        assert patience.waits(error)
        clock.now += 0.2
        assert not patience.waits(error)
        patience.forget(error)
        assert patience.waits(error)


async def test_a_quarantine_that_cannot_be_written_is_tried_again(own: Spool) -> None:
    notebook, said = Notebook(), [exchange(), exchange()]
    notebook.refuses = lambda record: record.msg_id == said[0].msg_id
    blocker = own.folder / "quarantine.seg"
    blocker.mkdir()
    with flushing(own, notebook) as (flusher, _):
        await append(own, *said)
        assert not await flusher.wait_until_taken(0.3)
        blocker.rmdir()
        await until_caught_up(flusher)
    assert notebook.records[-1] == said[1]
    assert _quarantined(own.folder) == [encode(said[0])]


async def test_slots_of_dead_processes_are_adopted_before_ours(tmp_path: Path) -> None:
    first, second = (Spool.open(tmp_path, sync=False) for _ in range(2))
    left = [exchange() for _ in range(3)]
    await append(second, *left)
    second.close()
    notebook, said = Notebook(), exchange()
    with flushing(first, notebook) as (flusher, _):
        await append(first, said)
        assert await flusher.wait_until_taken(60)
    assert notebook.records == [*left, said]
    with flushing(first, notebook):
        pass
    assert len(notebook.records) == 4, "what was adopted is not adopted again"
    first.close()


async def test_what_a_process_leaves_that_dies_later_is_adopted_too(tmp_path: Path) -> None:
    first, second = (Spool.open(tmp_path, sync=False) for _ in range(2))
    notebook, left = Notebook(), [exchange() for _ in range(3)]
    with flushing(first, notebook):
        await append(second, *left)
        second.close()
        with (second.folder / "00000001.seg").open("ab") as file:
            file.write(b"torn")
        async with asyncio.timeout(60):
            while spool_format.segments(second.folder):  # noqa: ASYNC110 - the flusher's thread adopts it
                await asyncio.sleep(0.05)
    assert notebook.records == left
    assert spool_format.backlog_of(second.folder) == 0
    again = Spool(second.folder, sync=False)
    await append(again, exchange())
    assert len(list(spool.read(again.folder, again.flushed.position))) == 1
    again.close()
    first.close()


@pytest.fixture
def remote() -> Iterator[See]:
    """A spool as it is seen from another process."""
    seen: list[RemoteSlot] = []

    def see(other: Spool) -> RemoteSlot:
        seen.append(RemoteSlot(other.folder, other.renew))
        return seen[-1]

    yield see
    for each in seen:
        each.close()


async def test_all_our_writers_are_followed_and_waited_for(own: Spool, remote: See) -> None:
    other, notebook, said = Spool.open(own.folder.parent, sync=False), Notebook(), [exchange() for _ in range(40)]
    slots, slot = slots_of(own), remote(other)
    slots.add(slot)
    with flushing(own, notebook, slots) as (flusher, _):
        for number, each in enumerate(said):
            await append((own, other)[number % 2], each)
            assert await flusher.wait_until_taken(60)
            assert each in notebook.records
        assert (own.backlog_bytes(), other.backlog_bytes()) == (0, 0)
        slot.renew()
        await append(other, exchange())
        assert await flusher.wait_until_taken(60)
        eventually(lambda: spool_format.segments(other.folder) == [2])
    other.close()


async def test_what_was_said_to_several_writers_comes_in_the_order_in_which_it_was_said(
    tmp_path: Path, engine: Engine
) -> None:
    first, second = (Spool.open(tmp_path, sync=False) for _ in range(2))
    said = [exchange() for _ in range(60)]
    for number, each in enumerate(said):
        await append(first, each)
        for turn, value in enumerate((1.0, 0.0, 1.0)):
            stamp, writer = steady_time.stamp(), (second, first)[(number + turn) % 2]
            await append(writer, feedback(msg_id=each.msg_id, value=value, stamp=stamp, received_at=1e9 - turn))
    slots = slots_of(first)
    slots.add(second)
    ledger = Ledger(engine)
    with flushing(first, ledger.recording, slots) as (flusher, _):
        assert await flusher.wait_until_taken(60)
    assert [row.reward_sum for row in ledger.reports.rewards()] == [60.0]
    first.close()
    second.close()


async def test_a_correction_is_not_seen_before_what_it_corrects(tmp_path: Path, engine: Engine) -> None:
    """Though that is written after one writer was looked at, and the correction before the other is."""
    first, second = (Spool.open(tmp_path, sync=False) for _ in range(2))
    said, loop = exchange(), asyncio.get_running_loop()
    await append(first, said)

    def rate(writer: Spool, value: float) -> None:
        rated = feedback(msg_id=said.msg_id, value=value, stamp=steady_time.stamp())
        asyncio.run_coroutine_threadsafe(append(writer, rated), loop).result(60)

    class LookedAt:
        """The first writer. Once it has been looked at, it hears a rating, and the other one the correction."""

        folder, flushed, renew = first.folder, first.flushed, first.renew
        rates = True

        @property
        def end(self) -> Position:
            found = first.end
            if self.rates and threading.current_thread().name == "flusher":
                self.rates = False
                rate(first, 0.0)
                rate(second, 1.0)
            return found

    slots, looked_at = Slots(tmp_path), LookedAt()
    slots.add(looked_at)
    slots.add(second)
    ledger = Ledger(engine)
    with flushing(first, ledger.recording, slots) as (flusher, _):
        while looked_at.rates:  # noqa: ASYNC110 - another thread looks
            await asyncio.sleep(0.01)
        await until_caught_up(flusher)
    assert [row.reward_sum for row in ledger.reports.rewards()] == [1.0]
    first.close()
    second.close()


async def test_what_is_read_again_after_a_kill_does_not_become_the_last_word(tmp_path: Path, engine: Engine) -> None:
    """The database had a group of the spool, the mark had not: in it somebody said again what was then corrected."""
    own, said, ledger = Spool.open(tmp_path, sync=False), exchange(), Ledger(engine)
    with flushing(own, ledger.recording) as (flusher, _):
        await append(own, said, feedback(msg_id=said.msg_id, value=0.0))
        await until_caught_up(flusher)
        marked = own.flushed.position
        await append(own, feedback(msg_id=said.msg_id, value=0.0), feedback(msg_id=said.msg_id, value=1.0))
        await until_caught_up(flusher)
    own.close()
    mark = own.folder / "flushed"
    mark.unlink()
    with closing(spool_slots.FlushedMark(mark)) as moved_back:
        moved_back.move(marked)
    again = Spool.open(tmp_path, sync=False)
    with flushing(again, ledger.recording) as (flusher, _):
        await append(again, feedback(msg_id=said.msg_id, metric="speed", value=2.0))
        await until_caught_up(flusher)
    again.close()
    assert [(row.metric, row.value) for row in _events(engine)] == [("reward", 0.0), ("reward", 1.0), ("speed", 2.0)]


async def test_what_several_dead_writers_left_comes_in_the_order_in_which_it_was_said(tmp_path: Path) -> None:
    writers = [Spool.open(tmp_path, sync=False) for _ in range(3)]
    now = steady_time.stamp()
    said = [feedback(stamp=now._replace(seconds=now.seconds + number)) for number in range(30)]
    before = feedback(stamp=steady_time.Stamp("another start", 1e12))
    for number, each in enumerate(said):
        await append(writers[number % 3], each)
    await append(late := Spool.open(tmp_path, sync=False), before)
    for each in (*writers, late):
        each.close()
    notebook, own = Notebook(), Spool.open(tmp_path / "own", sync=False)
    with flushing(own, notebook, Slots(tmp_path)):
        eventually(lambda: len(notebook.records) == 31)
    assert notebook.records == [before, *said]
    own.close()


async def test_what_a_writer_that_died_had_acknowledged_is_waited_for(own: Spool, remote: See) -> None:
    other, notebook = Spool.open(own.folder.parent, sync=False), Notebook()
    slots, left, slot = slots_of(own), [exchange() for _ in range(3)], remote(other)
    slots.add(slot)
    await append(other, *left)
    other.close()
    slots.leave(slot)
    with flushing(own, notebook, slots) as (flusher, _):
        assert await flusher.wait_until_taken(60)
        assert notebook.records == left
        eventually(lambda: slots.ours == [own])
    with pytest.raises(ValueError, match="closed"):
        slot.flushed.move(Position(9, 9))


async def test_many_wait_and_are_all_told(own: Spool) -> None:
    notebook = Notebook()
    notebook.away = True
    with flushing(own, notebook) as (flusher, _):
        await append(own, exchange())
        waiting = [asyncio.ensure_future(flusher.wait_until_taken(60)) for _ in range(4)]
        assert await asyncio.gather(*waiting) == [False] * 4, "nobody waits for a database that is away"
        notebook.away = False
        await until_caught_up(flusher)
        assert await asyncio.gather(*(flusher.wait_until_taken(60) for _ in range(4))) == [True] * 4
    assert not [each for each in threading.enumerate() if each.name == "flusher"]


def _events(engine: Engine) -> Sequence[Any]:
    with engine.connect() as connection:
        return connection.execute(select(feedback_table).order_by(feedback_table.c.id)).all()


def _quarantined(folder: Path) -> list[bytes]:
    with (folder / "quarantine.seg").open("rb") as file:
        found = []
        while (payload := spool_format.next_payload(file)) is not None:
            found.append(payload)
        return found
