"""The way from the outbox into the ledger: nothing is lost, nothing comes twice, nobody holds up the others."""

import asyncio
import errno
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.running import eventually
from tests.factories import exchange, feedback
from tuneloop.explorer import drain as module
from tuneloop.explorer.drain import GROUP, Drain
from tuneloop.runner import outbox
from tuneloop.runner.outbox import Outbox, names_in
from tuneloop.shared.errors import (
    LedgerError,
    LedgerForbidden,
    LedgerUnavailable,
    RecordRefused,
    RecordsLost,
    TuneloopError,
)
from tuneloop.shared.experience import Feedback, Outcome, Record, encode
from tuneloop.shared.ledger.recording.feedback import FeedbackResults
from tuneloop.shared.outbox_status import OutboxStatus

pytestmark = pytest.mark.contract


class Notebook:
    """Stands for the ledger: notes what it is given, may be away, may refuse some."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.numbers: dict[str, int] = defaultdict(int)
        self.refused: list[tuple[bytes, str]] = []
        self.removed: list[str] = []
        self.away = False
        self.refuses: Callable[[Record], bool] = lambda record: False
        self.error: type[Exception] = LedgerError

    def check_place(self) -> None:
        """It has no file."""

    def record(
        self, records: Sequence[Record], places: Sequence[tuple[str, int]], known: Mapping[str, int]
    ) -> FeedbackResults:
        if self.away:
            raise LedgerUnavailable("away\nfor a while")
        if any(known.get(file, 0) > self.numbers[file] for file, _ in places):
            raise RecordsLost("some are missing")
        if any(self.refuses(each) for each in records):
            raise self.error("no\nnever")
        for record, (file, number) in zip(records, places, strict=True):
            if number > self.numbers[file]:
                self.records.append(record)
                self.numbers[file] = number
        return FeedbackResults(
            outcomes={each.event_id: Outcome.ACCEPTED for each in records if hasattr(each, "event_id")}
        )

    def refuse(
        self, file: str, number: int, end_offset: int, payload: bytes, reason: str, known: Mapping[str, int]
    ) -> None:
        if self.away:
            raise LedgerUnavailable("away")
        if known.get(file, 0) > self.numbers[file]:
            raise RecordsLost("some are missing")
        self.refused.append((payload, reason))
        self.numbers[file] = max(self.numbers[file], number)

    def taken_numbers(self, files: Collection[str]) -> dict[str, int]:
        return {file: self.numbers[file] for file in files}

    def note_removed(self, files: Collection[str]) -> None:
        self.removed += files


class Listener:
    def __init__(self) -> None:
        self.told: list[tuple[str, FeedbackResults]] = []
        self.now, self.away = OutboxStatus(), False
        self.set_aside = 0
        self.failures: list[TuneloopError] = []

    def taken(self, owner: str, results: FeedbackResults) -> None:
        self.told.append((owner, results))

    def tell(self, status: OutboxStatus, away: bool) -> None:
        self.now, self.away = status, away

    def refused(self) -> None:
        self.set_aside += 1

    def failed(self, error: TuneloopError) -> None:
        self.failures.append(error)


@contextmanager
def draining(folder: Path, notebook: object, *owners: Outbox, **more: Any) -> Iterator[tuple[Drain, Listener]]:
    listener = Listener()
    drain = Drain(
        folder,
        notebook,  # type: ignore[arg-type]
        taken=listener.taken,
        tell=listener.tell,
        refused=listener.refused,
        failed=listener.failed,
        **more,
    )
    drain.owners.update(each.owner for each in owners)
    drain.start()
    try:
        yield drain, listener
    finally:
        drain.stop()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Outbox]:
    found = Outbox(tmp_path / "outbox", 1 << 20)
    yield found
    found.close()


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECORD_PATIENCE_S", 0.1)
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)


def append(own: Outbox, *records: Record) -> None:
    own.append([encode(each) for each in records])


async def until_caught_up(drain: Drain) -> None:
    """The drain notices only at its next try that the database is back."""
    async with asyncio.timeout(60):
        while not await drain.wait_until_taken(60):  # noqa: ASYNC110 - it is the drain's thread that moves on
            await asyncio.sleep(0.02)


def left_by_a_dead_process(folder: Path, *records: Record) -> Path:
    """The file that it wrote."""
    dead = Outbox(folder, 1 << 20)
    append(dead, *records)
    dead.close()
    return folder / names_in(folder)[-1]


async def test_records_reach_the_ledger_in_their_order(own: Outbox, notebook: Notebook) -> None:
    said = [exchange() for _ in range(3 * GROUP)]
    with draining(own.folder, notebook, own) as (drain, listener):
        for each in said:
            append(own, each)
        assert await drain.wait_until_taken(60)
        assert notebook.records == said
        eventually(lambda: listener.now[:4] == (0, 0, 0, None))


async def test_a_drain_that_cannot_go_on_says_so(own: Outbox, notebook: Notebook) -> None:
    notebook.refuses, notebook.error = lambda record: True, RuntimeError
    append(own, exchange())
    with draining(own.folder, notebook, own) as (_, listener):
        eventually(lambda: bool(listener.failures))
    assert "no" in str(listener.failures[0])


async def test_the_owner_hears_what_became_of_its_feedback(own: Outbox, notebook: Notebook) -> None:
    other, said = Outbox(own.folder, 1 << 20), feedback()
    append(own, said)
    append(other, exchange())
    with draining(own.folder, notebook, own, other) as (drain, listener):
        assert await drain.wait_until_taken(60)
    other.close()
    assert [(owner, [*results.outcomes]) for owner, results in listener.told] == [(own.owner, [said.event_id])]


async def test_while_the_database_is_away_all_waits_and_a_stop_is_quick(own: Outbox, notebook: Notebook) -> None:
    said = [exchange() for _ in range(5)]
    notebook.away = True
    with draining(own.folder, notebook, own) as (drain, listener):
        append(own, *said)
        assert not await drain.wait_until_taken(5)
        eventually(lambda: listener.away and listener.now.records == 5)
        assert listener.now.since == pytest.approx(said[0].received_at + said[0].latency_s)
        started = time.monotonic()
    assert time.monotonic() - started < 10
    notebook.away = False
    with draining(own.folder, notebook, own) as (drain, _):
        assert await drain.wait_until_taken(60)
    assert notebook.records == said


async def test_a_long_backlog_does_not_keep_a_stop_waiting_and_is_not_lost(
    own: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.0)
    begun, may_go_on, said = threading.Event(), threading.Event(), [exchange() for _ in range(3 * GROUP)]

    class Slow(Notebook):
        def record(self, *given: Any) -> FeedbackResults:
            begun.set()
            assert may_go_on.wait(60)
            return super().record(*given)

    notebook = Slow()
    append(own, *said)
    with draining(own.folder, notebook, own) as (drain, _):
        assert await asyncio.to_thread(begun.wait, 60)
        stopping = asyncio.create_task(asyncio.to_thread(drain.stop))
        while not drain._stop.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.01)
        may_go_on.set()
        await stopping
    assert notebook.records == said[:GROUP]
    with draining(own.folder, notebook, own) as (again, _):
        assert await again.wait_until_taken(60)
    assert notebook.records == said


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("error", [LedgerError, RecordRefused, ValueError, OverflowError])
async def test_a_refused_record_goes_aside_and_the_others_through(
    own: Outbox, notebook: Notebook, error: type[Exception]
) -> None:
    said = [exchange() for _ in range(9)]
    notebook.refuses, notebook.error = lambda record: record == said[4], error
    with draining(own.folder, notebook, own) as (drain, listener):
        append(own, *said)
        await until_caught_up(drain)
    assert notebook.records == said[:4] + said[5:]
    assert (notebook.refused, listener.set_aside) == ([(encode(said[4]), "no")], 1)


async def test_a_record_of_no_known_kind_goes_aside(own: Outbox, notebook: Notebook) -> None:
    own.append([encode(one := exchange()), b"no record", encode(two := exchange())])
    with draining(own.folder, notebook, own) as (drain, listener):
        assert await drain.wait_until_taken(60)
    assert (notebook.records, listener.set_aside, notebook.refused[0][0]) == ([one, two], 1, b"no record")


@pytest.mark.parametrize("error", [LedgerForbidden, LedgerError, RecordRefused])
async def test_what_is_refused_for_a_while_goes_in_afterwards(
    own: Outbox, notebook: Notebook, error: type[Exception]
) -> None:
    said = [exchange() for _ in range(9)]
    notebook.refuses, notebook.error = lambda record: True, error
    with draining(own.folder, notebook, own) as (drain, listener):
        append(own, *said)
        eventually(lambda: listener.now.refusal == "no")
        assert not await drain.wait_until_taken(1.0)
        notebook.refuses = lambda record: False
        await until_caught_up(drain)
        eventually(lambda: listener.now.refusal is None)
    assert (notebook.records, listener.set_aside) == (said, 0)


async def test_a_damaged_record_costs_itself_alone(own: Outbox, notebook: Notebook) -> None:
    said = [feedback() for _ in range(20)]
    path = left_by_a_dead_process(own.folder, *said)
    data = bytearray(path.read_bytes())
    data[data.find(said[1].event_id.encode())] ^= 1
    path.write_bytes(data)
    with draining(own.folder, notebook, own) as (drain, listener):
        assert await drain.wait_until_taken(60)
    assert notebook.records == [said[0], *said[2:]]
    assert (listener.set_aside, [reason for _, reason in notebook.refused]) == (1, ["these bytes are damaged"])


async def test_a_record_that_is_being_written_is_waited_for(own: Outbox, notebook: Notebook) -> None:
    said = [exchange(), exchange()]
    append(own, *said)
    [name] = names_in(own.folder)
    path = own.folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with draining(own.folder, notebook, own) as (drain, listener):
        assert await drain.wait_until_taken(60)
        assert notebook.records == said[:1]
        with path.open("r+b") as file:
            file.write(whole)
        eventually(lambda: notebook.records == said)
        assert listener.set_aside == 0


async def test_files_of_dead_processes_are_drained_kept_for_a_while_and_removed(
    own: Outbox, notebook: Notebook
) -> None:
    """Some of them begun after the drain, as when there were more workers."""
    folder, said = own.folder, [exchange() for _ in range(100)]
    for each in said[:90]:
        left_by_a_dead_process(folder, each)
    with draining(folder, notebook, own) as (drain, _):
        assert await drain.wait_until_taken(60)
        for each in said[90:]:
            left_by_a_dead_process(folder, each)
        assert await drain.wait_until_taken(60)
        assert notebook.records == said
        assert len(names_in(folder)) == 100
        drain.forget()
        drain.wake()
        eventually(lambda: names_in(folder) == [] and len(notebook.removed) == 100)


async def test_of_ten_thousand_files_few_are_open(
    own: Outbox, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    payload, most = encode(exchange()), 0
    for _ in range(10_000):
        own.append([payload])
        own.begin_new_file()
    before = len(os.listdir("/proc/self/fd"))
    with draining(own.folder, notebook, own) as (drain, _):
        waiting = asyncio.create_task(until_caught_up(drain))
        while not waiting.done():
            most = max(most, len(os.listdir("/proc/self/fd")) - before)
            await asyncio.sleep(0.01)
    assert (len(notebook.records), most < 20) == (10_000, True)


async def test_a_file_that_is_copied_back_is_not_taken_twice(own: Outbox, notebook: Notebook) -> None:
    path = left_by_a_dead_process(own.folder, *(said := [feedback(), feedback()]))
    data = path.read_bytes()
    for _ in range(2):
        path.write_bytes(data)
        with draining(own.folder, notebook, own, keep_s=0.0) as (drain, _):
            assert await drain.wait_until_taken(60)
            eventually(lambda: names_in(own.folder) == [])
    assert notebook.records == said


async def test_a_file_that_is_deleted_under_its_writer_costs_nothing_that_is_said_later(
    own: Outbox, notebook: Notebook
) -> None:
    with draining(own.folder, notebook, own) as (drain, _):
        append(own, one := exchange())
        assert await drain.wait_until_taken(60)
        [name] = names_in(own.folder)
        (own.folder / name).unlink()
        append(own, two := exchange())
        assert await drain.wait_until_taken(60)
    assert notebook.records == [one, two]


async def test_two_services_on_one_folder_take_each_its_own(own: Outbox, notebook: Notebook) -> None:
    other, others = Outbox(own.folder, 1 << 20), Notebook()
    with draining(own.folder, notebook, own) as (one, _), draining(own.folder, others, other) as (two, _):
        for _ in range(50):
            append(own, exchange())
            append(other, exchange())
        assert await one.wait_until_taken(60)
        assert await two.wait_until_taken(60)
    other.close()
    assert (len(notebook.records), len(others.records)) == (50, 50)


async def test_a_link_to_the_folder_is_as_good(tmp_path: Path, notebook: Notebook) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there")
    own = Outbox(link, 1 << 20)
    append(own, said := exchange())
    with draining(link, notebook, own) as (drain, _):
        assert await drain.wait_until_taken(60)
    own.close()
    assert notebook.records == [said]


async def test_a_ledger_that_has_lost_records_gets_them_again(
    own: Outbox, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby that lagged was promoted: of one file some records are missing, of another one all."""
    monkeypatch.setattr(module, "_COMPARE_S", 0.1)
    left = left_by_a_dead_process(own.folder, *(before := [exchange(), exchange()]))
    with draining(own.folder, notebook, own) as (drain, _):
        append(own, *(said := [exchange(), exchange()]))
        assert await drain.wait_until_taken(60)
        notebook.records = []
        notebook.numbers.pop(left.stem)
        notebook.numbers[names_in(own.folder)[1].removesuffix(".records")] = 1
        eventually(lambda: notebook.records == [*before, said[1]])


async def test_what_cannot_be_read_and_is_not_ours_holds_up_nobody(
    own: Outbox, notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    append(own, said := exchange())
    (own.folder / f"{1:020d}-aaaaaaaa-{1:016x}.records").mkdir()
    (own.folder / "copy.records").write_bytes(b"x")
    with draining(own.folder, notebook, own) as (drain, listener):
        for _ in range(3):
            assert await drain.wait_until_taken(60)
        eventually(lambda: listener.now[:3] == (0, 0, 0))
    assert notebook.records == [said]
    assert capsys.readouterr().out.count("outbox_not_read") == 1


async def test_what_comes_after_lost_records_does_not_hide_them(own: Outbox, notebook: Notebook) -> None:
    """The service goes on while a standby that lagged is promoted, before the numbers are compared."""
    with draining(own.folder, notebook, own) as (drain, listener):
        append(own, *(said := [exchange() for _ in range(4)]))
        assert await drain.wait_until_taken(60)
        for more in (exchange(), feedback()):
            notebook.records, notebook.numbers[names_in(own.folder)[0].removesuffix(".records")] = said[:2], 2
            notebook.refuses, notebook.error = lambda record: isinstance(record, Feedback), ValueError
            append(own, more)
            said.append(more)
            await until_caught_up(drain)
            assert notebook.records == said[:5]
        assert listener.set_aside == 1


async def test_no_file_is_removed_that_the_ledger_has_lost(own: Outbox, notebook: Notebook) -> None:
    left = left_by_a_dead_process(own.folder, *(said := [exchange(), exchange()]))
    with draining(own.folder, notebook, own, keep_s=1.0) as (drain, _):
        assert await drain.wait_until_taken(60)
        notebook.records, notebook.numbers[left.stem] = said[:1], 1
        eventually(lambda: notebook.removed == [left.stem])
    assert notebook.records == said


async def test_a_file_that_cannot_be_removed_is_not_read_again(
    own: Outbox, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, offered = left_by_a_dead_process(own.folder, exchange()), list[Record]()
    notebook.refuses = lambda record: bool(offered.append(record))  # type: ignore[func-returns-value]

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with draining(own.folder, notebook, own, keep_s=0.0) as (drain, _):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            for _ in range(5):
                assert await drain.wait_until_taken(60)
        eventually(lambda: left.stem in notebook.removed)
    assert len(offered) == 1
    assert not left.exists()


async def test_a_file_that_its_owner_has_not_locked_yet_is_none_that_is_drained(
    own: Outbox, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks, pauses = outbox.lock, [0.3]

    def lock_late(descriptor: int) -> bool:
        if pauses and threading.current_thread() is threading.main_thread():
            drain.wake()
            time.sleep(pauses.pop())
        return locks(descriptor)

    with draining(own.folder, notebook, own) as (drain, _):
        monkeypatch.setattr(outbox, "lock", lock_late)
        append(own, one := exchange())
        append(own, other := exchange())
        assert await drain.wait_until_taken(60)
        assert notebook.records == [one, other]


async def test_a_folder_that_cannot_be_read_is_read_when_it_can(own: Outbox, notebook: Notebook) -> None:
    moved = own.folder.with_name("moved")
    append(own, said := exchange())
    own.folder.rename(moved)
    with draining(own.folder, notebook, own) as (drain, _):
        assert not await drain.wait_until_taken(1)
        moved.rename(own.folder)
        await until_caught_up(drain)
    assert notebook.records == [said]


async def test_many_wait_and_are_all_told(own: Outbox, notebook: Notebook) -> None:
    notebook.away = True
    with draining(own.folder, notebook, own) as (drain, _):
        append(own, exchange())
        assert await asyncio.gather(*(drain.wait_until_taken(60) for _ in range(500))) == [False] * 500
        notebook.away = False
        await until_caught_up(drain)
        assert await asyncio.gather(*(drain.wait_until_taken(60) for _ in range(500))) == [True] * 500
