"""When the outbox takes no more, and what the explorer deletes by itself."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.running import RunningExplorer, eventually, explorer_running, open_ledger, settings_for
from tests.factories import exchange, outboxed
from tuneloop.cli.erasure import erase
from tuneloop.explorer.recorder import FILE_BYTES, RESERVE_BYTES, OutboxLimits
from tuneloop.runner.outbox import Outbox, names_in
from tuneloop.shared.errors import LedgerForbidden, StorageFull
from tuneloop.shared.experience import Exchange, State
from tuneloop.shared.outbox_status import OutboxStatus, path_of
from tuneloop.shared.settings.feedback import RetentionSettings

GIB = 1 << 30


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Outbox]:
    found = Outbox(tmp_path, 1 << 20)
    yield found
    found.close()


def limits(own: Outbox, *, max_bytes: int = GIB, max_age_s: float = 3600.0, **more: Any) -> OutboxLimits:
    return OutboxLimits(own, max_bytes=max_bytes, max_age_s=max_age_s, **more)


def disk(free: int, total: int = 1000 * GIB) -> Callable[[Path], os.statvfs_result]:
    """A file system of that many bytes, whatever lies on it."""
    return lambda _path: os.statvfs_result((1, 1, total, free, free, 1, 1, 1, 0, 255))


def test_the_bound_is_kept_until_the_database_has_caught_up(own: Outbox) -> None:
    found = limits(own, max_bytes=500)
    found.admit()
    own.append([b"x" * 200])
    found.admit()
    found.note(OutboxStatus(bytes=own.written + 300))
    with pytest.raises(StorageFull, match="500 bytes"):
        found.admit()
    found.note(OutboxStatus())
    found.admit()
    own.append([b"x" * 600])
    with pytest.raises(StorageFull, match="500 bytes"):
        found.admit()


@pytest.mark.parametrize(("free", "total"), [(RESERVE_BYTES, 1000 * GIB), (GIB // 20, GIB)])
def test_a_disk_is_not_filled_to_its_last_byte(
    own: Outbox, monkeypatch: pytest.MonkeyPatch, free: int, total: int
) -> None:
    monkeypatch.setattr(os, "statvfs", disk(free + 100, total))
    found = limits(own)
    found.admit()
    own.append([b"x" * 200])
    with pytest.raises(StorageFull, match="the disk of the outbox"):
        found.admit()


@pytest.mark.parametrize(("free", "files"), [(RESERVE_BYTES + 2 * FILE_BYTES, 1), (RESERVE_BYTES + FILE_BYTES // 2, 2)])
def test_on_a_disk_with_little_room_files_are_let_go_soon(
    own: Outbox, monkeypatch: pytest.MonkeyPatch, free: int, files: int
) -> None:
    monkeypatch.setattr(os, "statvfs", disk(free))
    found, began = limits(own), time.monotonic()
    own.append([b"one"])
    monkeypatch.setattr(time, "monotonic", lambda: began + 60)
    found.look()
    own.append([b"two"])
    assert len(names_in(own.folder)) == files


def test_what_has_waited_too_long_refuses_more(own: Outbox) -> None:
    found = limits(own, max_age_s=50)
    found.note(OutboxStatus(since=time.time() - 60))
    with pytest.raises(StorageFull, match="for 50 seconds"):
        found.admit()
    found.note(OutboxStatus(since=time.time() - 40))
    found.admit()


def test_a_database_that_is_not_there_any_more_refuses_more(own: Outbox) -> None:
    def refuse() -> None:
        raise LedgerForbidden("it was replaced")

    with pytest.raises(StorageFull, match="it was replaced"):
        limits(own, check_database=refuse).admit()


def test_a_disk_that_refused_a_record_is_tried_before_more_is_taken(own: Outbox) -> None:
    found = limits(own)
    found.broken = "no room"
    with pytest.raises(StorageFull, match="no room"):
        found.admit()
    found.look()
    found.admit()


# What the explorer deletes by itself.


def holding(folder: Path, words: bytes = b"goldfinch") -> set[str]:
    """The files below a folder that hold the words."""
    found = set()
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # it has just been removed
            if path.is_file() and words in path.read_bytes():
                found.add(str(path.relative_to(folder)))
    return found


def test_nothing_of_a_person_is_left_in_the_job_folder(explorer: RunningExplorer) -> None:
    for user in ("ann", "bob"):
        said = explorer.chat(user=user, messages=[{"role": "user", "content": f"goldfinch of {user}"}]).json()["id"]
        explorer.feedback(said, comment=f"goldfinch of {user}")
    explorer.until_flushed()
    folder = explorer.settings.job_dir
    assert any(name.startswith("outbox/") for name in holding(folder, b"goldfinch of ann"))
    commandline = open_ledger(explorer.settings)
    erase(commandline, "default", "ann")
    commandline.close()
    eventually(lambda: holding(folder, b"goldfinch of ann") == set())
    assert explorer.counts()[State.REWARDED] == 1
    assert explorer.rows("SELECT user_id FROM exchanges") == [("bob",)]
    explorer.chat(user="ann", messages=[{"role": "user", "content": "hello again"}])
    assert explorer.rows("SELECT count(*) FROM exchanges WHERE user_id = 'ann'") == [(1,)]


def test_what_waited_of_a_person_who_was_erased_meanwhile_is_not_taken(explorer: RunningExplorer) -> None:
    explorer.ledger.recording.away = True
    explorer.chat(user="ann", messages=[{"role": "user", "content": "goldfinch"}])
    explorer.chat(user="bob")
    commandline = open_ledger(explorer.settings)
    erase(commandline, "default", "ann")
    commandline.close()
    explorer.ledger.recording.away = False
    eventually(lambda: holding(explorer.settings.job_dir) == set())
    eventually(lambda: explorer.rows("SELECT user_id FROM exchanges") == [("bob",)])


def damaged(folder: Path, record: Exchange) -> Path:
    """A file with one record, in which a bit has flipped."""
    path = path_of(folder, outboxed(folder, record))
    data = bytearray(path.read_bytes())
    data[6] ^= 1  # in its length
    path.write_bytes(data)
    return path


def test_nothing_of_a_person_is_left_wherever_it_lies(tmp_path: Path, double: EngineDouble) -> None:
    """In files that were drained, were closed, are open, or are damaged, and among what was refused, then and later."""
    settings = settings_for(tmp_path, [double.url])
    folder, outbox = settings.job_dir, settings.outbox_dir
    theirs = [exchange(tenant="default", user="ann", request=f'{{"x": "goldfinch {n}"}}'.encode()) for n in range(4)]
    outboxed(outbox, theirs[0], exchange())
    damaged(outbox, theirs[1])
    later = damaged(tmp_path / "later", theirs[2])  # as of a process that is killed only then
    with explorer_running(settings) as explorer:
        explorer.ledger.recording.refuses = lambda record: isinstance(record, Exchange) and record.priority == 7.0
        outboxed(outbox, msgspec.structs.replace(theirs[3], priority=7.0))
        said = explorer.chat(user="ann", messages=[{"role": "user", "content": "goldfinch"}]).json()["id"]
        explorer.feedback(said, comment="goldfinch")
        recording = explorer.ledger.recording
        eventually(lambda: len(recording.refused_records()) == 2)
        explorer.until_flushed()
        assert len([name for name in holding(folder) if name.startswith("outbox/")]) == 4
        assert any("ledger.db" in name for name in holding(folder))
        commandline = open_ledger(settings)
        erase(commandline, "default", "ann")
        commandline.close()
        eventually(lambda: holding(folder) == set())
        later.rename(outbox / later.name)
        eventually(lambda: [each.size for each in recording.refused_records()] == [0])
        explorer.until_flushed()
    with explorer_running(settings) as explorer:  # which reads all files that are kept once more
        explorer.until_flushed()
        eventually(lambda: holding(folder) == set())
        assert [each.size for each in explorer.ledger.recording.refused_records()] == [0]


def test_retention_is_applied_by_the_explorer(tmp_path: Path, double: EngineDouble) -> None:
    settings = settings_for(tmp_path, [double.url])
    ledger = open_ledger(settings)
    ledger.recording.record([exchange(received_at=1.0), exchange(received_at=time.time())])
    ledger.close()
    with explorer_running(settings.model_copy(update={"retention": RetentionSettings(recorded=60.0)})) as explorer:
        eventually(lambda: explorer.metrics()["tuneloop_purged_total"] == 1)
        assert explorer.counts()[State.RECORDED] == 1
