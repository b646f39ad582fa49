import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from explorer import spool
from explorer.flusher import Flusher
from explorer.spool import Position, Spool
from shared.errors import LedgerError, LedgerUnavailable, TuneloopError
from shared.experience import Record, State, encode
from shared.ledger import Ledger
from tests.factories import exchange, experience, feedback


class Notebook:
    """Stands for the ledger: notes what it is given, may be away, may refuse some."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.tries = 0
        self.away = False
        self.refuses: Callable[[Record], bool] = lambda record: False
        self.error: type[Exception] = LedgerError

    def record(self, records: Sequence[Record]) -> None:
        self.tries += 1
        if self.away:
            raise LedgerUnavailable("away\nfor a while")
        if any(self.refuses(each) for each in records):
            raise self.error("no\nnever")
        self.records += records


@contextmanager
def flushing(own: Spool, ledger: object) -> Iterator[tuple[Flusher, list[int]]]:
    set_aside: list[int] = []
    flusher = Flusher(own, ledger, quarantined=lambda: set_aside.append(1), failed=pytest.fail)  # type: ignore[arg-type]
    flusher.start()
    try:
        yield flusher, set_aside
    finally:
        flusher.stop()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Spool]:
    found = Spool.open(tmp_path / "spool", max_bytes=1 << 30, sync=False)
    yield found
    found.close()


async def until_caught_up(flusher: Flusher, position: Position) -> None:
    """The flusher notices only at its next try that the database is back."""
    async with asyncio.timeout(60):
        while not await flusher.caught_up(position, 60):  # noqa: ASYNC110 - it is the flusher's thread that moves on
            await asyncio.sleep(0.02)


async def append(own: Spool, *records: Record) -> Position:
    return await own.append([encode(each) for each in records])


class Broken:
    """A ledger with a bug."""

    def record(self, _records: Sequence[Record]) -> None:
        raise RuntimeError("a bug")


async def test_a_flusher_that_cannot_go_on_says_so(own: Spool) -> None:
    failures: list[TuneloopError] = []
    flusher = Flusher(own, Broken(), quarantined=pytest.fail, failed=failures.append)  # type: ignore[arg-type]
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
        assert await flusher.caught_up(own.end, 60)
    assert notebook.records == said
    assert own.backlog_bytes() == 0


async def test_what_was_spooled_while_the_database_was_away_comes_later(own: Spool) -> None:
    notebook, said = Notebook(), [exchange() for _ in range(50)]
    notebook.away = True
    with flushing(own, notebook) as (flusher, _):
        for each in said:
            await append(own, each)
        assert not await flusher.caught_up(own.end, 0.2)
        notebook.away = False
        await until_caught_up(flusher, own.end)
    assert notebook.records == said


async def test_stopping_while_the_database_is_away_is_quick_and_loses_nothing(tmp_path: Path) -> None:
    notebook, said = Notebook(), [exchange() for _ in range(5)]
    notebook.away = True
    own = Spool.open(tmp_path, max_bytes=1 << 30, sync=False)
    with flushing(own, notebook):
        await append(own, *said)
        await asyncio.sleep(0.3)
        started = time.monotonic()
    own.close()
    assert time.monotonic() - started < 2
    notebook.away = False
    again = Spool.open(tmp_path, max_bytes=1 << 30, sync=False)
    with flushing(again, notebook) as (flusher, _):
        assert await flusher.caught_up(again.end, 60)
    again.close()
    assert notebook.records == said


async def test_what_came_right_before_the_stop_is_moved(own: Spool) -> None:
    for _ in range(20):
        notebook, said = Notebook(), exchange()
        with flushing(own, notebook):
            await append(own, said)
        assert notebook.records == [said]


@pytest.mark.parametrize("error", [LedgerError, ValueError, OverflowError])
async def test_a_refused_record_goes_aside_and_the_others_through(own: Spool, error: type[Exception]) -> None:
    notebook, said = Notebook(), [exchange() for _ in range(9)]
    notebook.refuses, notebook.error = lambda record: record.msg_id == said[4].msg_id, error
    with flushing(own, notebook) as (flusher, set_aside):
        await append(own, *said)
        assert await flusher.caught_up(own.end, 60)
    assert notebook.records == said[:4] + said[5:]
    assert set_aside == [1]
    assert _quarantined(own.folder) == [encode(said[4])]


async def test_bytes_that_are_no_record_go_aside(own: Spool) -> None:
    notebook, said = Notebook(), exchange()
    with flushing(own, notebook) as (flusher, set_aside):
        await own.append([b"nonsense", encode(said)])
        assert await flusher.caught_up(own.end, 60)
    assert (notebook.records, set_aside) == ([said], [1])


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_the_real_ledger_refuses_and_the_rest_goes_in(own: Spool, ledger: Ledger) -> None:
    said = exchange()
    mangled = exchange(experiences=(experience(logprobs=b"\0\0"),))
    with flushing(own, ledger) as (flusher, set_aside):
        await append(own, said, mangled, feedback(msg_id=said.msg_id))
        assert await flusher.caught_up(own.end, 60)
    assert ledger.counts()[State.REWARDED] == 1
    assert set_aside == [1]


async def test_a_quarantine_that_cannot_be_written_is_tried_again(own: Spool) -> None:
    notebook, said = Notebook(), [exchange(), exchange()]
    notebook.refuses = lambda record: record.msg_id == said[0].msg_id
    blocker = own.folder / "quarantine.seg"
    blocker.mkdir()
    with flushing(own, notebook) as (flusher, _):
        await append(own, *said)
        assert not await flusher.caught_up(own.end, 0.3)
        blocker.rmdir()
        assert await flusher.caught_up(own.end, 60)
    assert notebook.records[-1] == said[1]
    assert _quarantined(own.folder) == [encode(said[0])]


async def test_slots_of_dead_processes_are_adopted_before_ours(tmp_path: Path) -> None:
    first, second = (Spool.open(tmp_path, max_bytes=1 << 30, sync=False) for _ in range(2))
    left = [exchange() for _ in range(3)]
    await append(second, *left)
    second.close()
    notebook, said = Notebook(), exchange()
    with flushing(first, notebook) as (flusher, _):
        end = await append(first, said)
        assert await flusher.caught_up(end, 60)
    assert notebook.records == [*left, said]
    with flushing(first, notebook):
        pass
    assert len(notebook.records) == 4, "what was adopted is not adopted again"
    first.close()


async def test_slots_of_living_processes_are_left_alone(tmp_path: Path) -> None:
    first, second = (Spool.open(tmp_path, max_bytes=1 << 30, sync=False) for _ in range(2))
    await append(second, exchange())
    notebook = Notebook()
    with flushing(first, notebook) as (flusher, _):
        assert await flusher.caught_up(first.end, 60)
    assert notebook.records == []
    first.close()
    second.close()


async def test_an_idle_spool_is_caught_up_at_once(own: Spool) -> None:
    with flushing(own, Notebook()) as (flusher, _):
        assert await flusher.caught_up(own.end, 60)
        position = await append(own, exchange())
        assert await flusher.caught_up(position, 60)
        assert await flusher.caught_up(position, 0)
        assert not await flusher.caught_up(Position(position.segment, position.offset + 1), 0.05)


async def test_the_end_is_reached_across_a_change_of_segment(tmp_path: Path) -> None:
    own = Spool(tmp_path / "0", max_bytes=1 << 30, sync=False, segment_bytes=300)
    notebook, said = Notebook(), [exchange() for _ in range(20)]
    with flushing(own, notebook) as (flusher, _):
        for each in said:
            assert await flusher.caught_up(await append(own, each), 60)
            assert await flusher.caught_up(own.end, 0)
    assert notebook.records == said
    assert len(spool.segments(own.folder)) <= 2
    own.close()


async def test_an_empty_segment_at_the_end_is_reached_with_records_before_it(own: Spool) -> None:
    notebook = Notebook()
    notebook.away = True
    with flushing(own, notebook) as (flusher, _):
        await append(own, exchange())
        own._next_segment()
        own.grown.set()
        notebook.away = False
        await until_caught_up(flusher, own.end)


async def test_many_wait_and_are_all_told(own: Spool) -> None:
    notebook = Notebook()
    notebook.away = True
    with flushing(own, notebook) as (flusher, _):
        end = await append(own, exchange())
        waiting = [asyncio.ensure_future(flusher.caught_up(end, 60)) for _ in range(4)]
        assert await asyncio.gather(*waiting) == [False] * 4, "nobody waits for a database that is away"
        notebook.away = False
        await until_caught_up(flusher, end)
        assert await asyncio.gather(*(flusher.caught_up(end, 60) for _ in range(4))) == [True] * 4
    assert not [each for each in threading.enumerate() if each.name == "flusher"]


def _quarantined(folder: Path) -> list[bytes]:
    with (folder / "quarantine.seg").open("rb") as file:
        found = []
        while (payload := spool._next_payload(file)) is not None:
            found.append(payload)
        return found
