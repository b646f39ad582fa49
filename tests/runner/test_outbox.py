"""The files of the outbox under damage, a bad disk, and people who move files: no acknowledged record is lost."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tuneloop.runner import outbox as outbox_module
from tuneloop.runner.outbox import Damage, Outbox, OutboxReader, Place, Record, lock, names_in

pytestmark = pytest.mark.contract

SYNC, WRITE = os.fsync, os.write
TWENTY = [b"record %d " % number + b"x" * number for number in range(20)]


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    found = Outbox(tmp_path / "outbox", 1 << 20)
    yield found
    found.close()


def files(outbox: Outbox) -> list[Path]:
    return sorted(outbox.folder.glob("*.records"))


def read(reader: OutboxReader, offset: int = 0) -> tuple[list[bytes], int]:
    """The payloads of a file, and how many stretches of it are damaged."""
    found = list(reader.read(offset))
    return [each.payload for each in found if isinstance(each, Record)], sum(isinstance(each, Damage) for each in found)


def read_claimed(path: Path) -> tuple[list[bytes], int]:
    with closing(OutboxReader(path)) as reader:
        assert reader.claim()
        return read(reader)


def places(reader: OutboxReader) -> list[Place]:
    return [Place(reader.id, each.number) for each in reader.read(0) if isinstance(each, Record)]


def left_in(outbox: Outbox) -> list[bytes]:
    """What its process left there, oldest first."""
    outbox.close()
    return [payload for path in files(outbox) for payload in read_claimed(path)[0]]


def start(*calls: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call) for call in calls]
    for each in threads:
        each.start()
    return threads


def test_records_are_read_in_their_order_at_their_places(outbox: Outbox) -> None:
    last = [outbox.append(TWENTY[:7]), outbox.append(TWENTY[7:])]
    with closing(OutboxReader(*files(outbox))) as reader:
        assert not reader.claim()
        assert places(reader) == [Place(reader.id, number) for number in range(1, 21)]
        assert last == [Place(reader.id, 7), Place(reader.id, 20)]
        assert read(reader) == (TWENTY, 0)
        [*_, fifth] = [each for each in reader.read(0) if isinstance(each, Record) and each.number <= 5]
        assert read(reader, fifth.end) == (TWENTY[5:], 0)
        assert outbox.written == reader.size


def test_a_bit_that_flips_in_any_byte_costs_one_record_alone(outbox: Outbox) -> None:
    outbox.append(TWENTY)
    outbox.close()
    [path] = files(outbox)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        found, damages = read_claimed(path)
        [lost] = set(TWENTY) - set(found)
        assert (found, damages) == ([each for each in TWENTY if each != lost], 1), place


def test_a_tail_that_is_torn_at_any_byte_is_damaged_when_its_owner_has_died(outbox: Outbox) -> None:
    """While the owner lives, it is being written: it is read when it is whole."""
    outbox.append(TWENTY[:2])
    [path] = files(outbox)
    acknowledged = path.stat().st_size
    outbox.append(TWENTY[2:3])
    whole = path.read_bytes()
    torn = range(acknowledged + 1, len(whole))
    with closing(OutboxReader(path)) as reader:
        for end in torn:
            os.truncate(path, end)
            assert not reader.claim()
            assert read(reader) == (TWENTY[:2], 0)
            path.write_bytes(whole)
            assert read(reader) == (TWENTY[:3], 0)
        outbox.close()
        for end in torn:
            path.write_bytes(whole[:end])
            assert reader.claim()
            assert read(reader) == (TWENTY[:2], 1)


def test_what_is_being_written_when_a_file_is_looked_at_is_not_damaged_though_the_file_is_claimed_meanwhile(
    outbox: Outbox,
) -> None:
    outbox.append(TWENTY[:1])
    [path] = files(outbox)
    end = path.stat().st_size
    outbox.append(TWENTY[1:2])
    whole = path.read_bytes()
    os.truncate(path, end + 5)
    with closing(OutboxReader(path)) as reader:
        reading = reader.read(0)
        next(reading)
        path.write_bytes(whole)
        outbox.close()
        assert reader.claim()
        assert list(reading) == []
        assert read(reader) == (TWENTY[:2], 0)


def test_what_a_client_says_does_not_pass_for_a_record(outbox: Outbox, tmp_path: Path) -> None:
    other = Outbox(tmp_path / "other", 1 << 20)
    other.append([b"I am a record"])
    other.close()
    outbox.append([b"before " + files(other)[0].read_bytes() + b" after"])
    outbox.close()
    [path] = files(outbox)
    whole = bytearray(path.read_bytes())
    whole[0] ^= 1
    path.write_bytes(whole)
    assert read_claimed(path) == ([], 1)


@pytest.mark.parametrize("refused", ["fsync", "write", "rest of a write"])
def test_after_an_error_of_the_disk_a_new_file_is_begun(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def refuse(*_: object) -> int:
        monkeypatch.undo()
        raise OSError(errno.ENOSPC, "of the test")

    def write_a_part(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", refuse)
        return WRITE(descriptor, data[:60])

    first = outbox.append([b"acknowledged"])
    monkeypatch.setattr(os, refused.split()[-1], write_a_part if refused.startswith("rest") else refuse)
    with pytest.raises(OSError, match="of the test") as told:
        outbox.append([b"refused"] * 3)
    assert told.value.errno == errno.ENOSPC
    again = outbox.append([b"said again"])
    assert (again.number, again.file > first.file) == (1, True)
    assert [path.stem for path in files(outbox)] == [first.file, again.file]
    assert left_in(outbox) == [b"acknowledged", b"said again"]


def test_a_full_disk_is_not_filled_with_empty_files(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "of the test")

    monkeypatch.setattr(os, "write", refuse)
    for _ in range(3):
        with pytest.raises(OSError, match="of the test"):
            outbox.append([b"refused"])
    assert files(outbox) == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "of the test"), MemoryError(), KeyboardInterrupt()])
def test_all_who_wait_for_what_fails_are_told_and_nobody_else(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    told: list[BaseException] = []

    def say(payload: bytes) -> None:
        try:
            outbox.append([payload])
        except BaseException as refusal:  # noqa: BLE001 - an interrupt is one, too
            told.append(refusal)

    def wait_for_all(descriptor: int) -> None:
        while len(outbox._waiting) < 4:
            time.sleep(0.001)
        monkeypatch.setattr(os, "fsync", fail)
        SYNC(descriptor)

    def fail(descriptor: int) -> None:
        late.extend(start(lambda: say(b"late")))
        while not outbox._waiting:
            time.sleep(0.001)
        monkeypatch.setattr(os, "fsync", SYNC)
        raise error

    late: list[threading.Thread] = []
    outbox.append([b"acknowledged"])
    monkeypatch.setattr(os, "fsync", wait_for_all)
    threads = start(*[lambda: say(b"x")] * 5)
    for each in threads:
        each.join(30)
    late[0].join(30)
    assert not any(each.is_alive() for each in (*threads, *late))
    assert len(told) == 4
    assert sum(not isinstance(each, OSError) for each in told) == (not isinstance(error, OSError))
    assert left_in(outbox) == [b"acknowledged", b"x", b"late"]


def test_who_is_interrupted_while_it_waits_holds_up_nobody(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def slow(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", SYNC)
        while not outbox._waiting:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGUSR1)
        interrupted.wait(30)
        SYNC(descriptor)

    interrupted = threading.Event()
    outbox.append([b"1"])
    before = signal.signal(signal.SIGUSR1, interrupt)
    monkeypatch.setattr(os, "fsync", slow)
    [writer] = start(lambda: outbox.append([b"2"]))
    while not outbox._is_writing:
        time.sleep(0.001)
    with pytest.raises(KeyboardInterrupt):
        outbox.append([b"3"])
    signal.signal(signal.SIGUSR1, before)
    [last] = start(lambda: outbox.append([b"4"]))
    interrupted.set()
    writer.join(30)
    last.join(30)
    assert not last.is_alive()
    assert left_in(outbox) == [b"1", b"2", b"3", b"4"], "what was interrupted may be there"


def test_many_threads_share_the_syncs(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = 0

    def slow(descriptor: int) -> None:
        nonlocal syncs
        syncs += 1
        while syncs == 1 and len(outbox._waiting) < 99:
            time.sleep(0.001)
        SYNC(descriptor)

    said: list[Place] = []
    said.append(outbox.append([b"the first makes the file"]))
    monkeypatch.setattr(os, "fsync", slow)
    for each in start(*[lambda: said.append(outbox.append([b"x", b"y"]))] * 100):
        each.join()
    assert syncs == 2
    assert sorted(said) == [Place(said[0].file, number) for number in range(1, 202, 2)]


@pytest.mark.parametrize("loss", ["deleted", "moved", "replaced", "overwritten"])
def test_what_is_said_after_a_file_was_taken_from_its_writer_is_in_a_new_file(outbox: Outbox, loss: str) -> None:
    first = outbox.append([b"yesterday"])
    [path] = files(outbox)
    yesterday, moved = path.read_bytes(), path.with_suffix(".moved")
    outbox.append([b"acknowledged"])
    if loss == "overwritten":
        path.write_bytes(yesterday)
    else:
        path.rename(moved)
        if loss == "deleted":
            moved.unlink()
        if loss == "replaced":
            path.write_bytes(yesterday)
    again = outbox.append([b"said again"])
    assert (again.number, again.file > first.file) == (1, True)
    left = left_in(outbox)
    assert left == ([b"said again"] if loss in {"deleted", "moved"} else [b"yesterday", b"said again"])
    if loss == "moved":
        moved.rename(path)
        assert read_claimed(path) == ([b"yesterday", b"acknowledged"], 0)


def test_a_folder_whose_files_are_deleted_at_once_takes_nothing(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(descriptor: int) -> None:
        for path in files(outbox):
            path.unlink()

    monkeypatch.setattr(os, "fsync", delete)
    with pytest.raises(OSError, match="deletes") as told:
        outbox.append([b"refused"])
    assert told.value.errno == errno.ESTALE


def test_a_file_of_a_living_process_is_its_own_and_one_of_a_dead_process_is_claimed_by_one_reader(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tuneloop.runner.outbox import Outbox\n"
        "outbox = Outbox(Path(sys.argv[1]), 1000); outbox.append([b'said']); print('', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        writer.stdout.readline()
        one, other = (OutboxReader(*tmp_path.iterdir()) for _ in range(2))
        assert not one.claim()
        writer.kill()
    assert (one.claim(), other.claim(), read(one), read(other)) == (True, False, ([b"said"], 0), ([b"said"], 0))
    one.path.unlink()
    one.close()
    assert (other.claim(), other.is_there) == (True, False)
    other.close()


def test_a_file_that_is_removed_before_it_is_locked_is_not_written(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may look for files of ended ones between the two, and finds this one empty."""

    def lock_late(descriptor: int) -> bool:
        monkeypatch.undo()
        [path] = files(outbox)
        with closing(OutboxReader(path)) as empty:
            assert empty.claim()
            path.unlink()
        return lock(descriptor)

    monkeypatch.setattr(outbox_module, "lock", lock_late)
    place = outbox.append([b"said"])
    assert [path.stem for path in files(outbox)] == [place.file]
    assert left_in(outbox) == [b"said"]


def test_a_linked_folder_stays_the_one_it_was(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "one")
    outbox = Outbox(link, 1000)
    link.unlink()
    link.symlink_to(tmp_path / "two")
    outbox.append([b"said"])
    assert [path.parent for path in files(outbox)] == [tmp_path / "one"]
    outbox.close()


def test_what_no_outbox_made_is_not_opened(outbox: Outbox) -> None:
    outbox.append([b"said"])
    outbox.close()
    [path] = files(outbox)
    shutil.copy(path, path.with_stem(f"{path.stem} copy"))
    path.with_name("1-a.records").write_bytes(b"x")
    path.with_name(f"{1:020d}-aaaaaaaa-{1:016x}.records").mkdir()
    path.with_name(f"{2:020d}-aaaaaaaa-{1:016x}.records").symlink_to(path)
    *others, name = names_in(outbox.folder)
    assert (len(others), name) == (2, path.name)
    for each in others:
        with pytest.raises(OSError, match=r"(?i)directory|symbolic"):
            OutboxReader(outbox.folder / each)


def test_a_file_that_is_copied_back_is_read_again_at_the_same_places(outbox: Outbox) -> None:
    outbox.append(TWENTY)
    outbox.close()
    [path] = files(outbox)
    yesterday = path.read_bytes()
    with closing(OutboxReader(path)) as before:
        path.unlink()
        path.write_bytes(yesterday)
        with closing(OutboxReader(path)) as again:
            assert places(before) == places(again)
            assert (before.is_there, again.is_there) == (False, True)


def test_a_full_file_is_followed_by_another_and_an_old_one_is_let_go(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, 100)
    for each in TWENTY:
        outbox.append([each])
    before = files(outbox)
    assert len(before) > 5
    outbox.begin_new_file(after_s=60)
    with closing(OutboxReader(before[-1])) as last:
        assert not last.claim()
        outbox.begin_new_file()
        assert last.claim()
    assert left_in(outbox) == TWENTY


WRITER = """
import sys, threading
from pathlib import Path
from tuneloop.runner.outbox import Outbox
outbox = Outbox(Path(sys.argv[1]), 1 << 16)
def say(thread):
    for number in range(100_000):
        place = outbox.append([b"%d %d " % (thread, number) + b"x" * (number % 3000)])
        sys.stdout.write(f"{thread} {number} {place.file} {place.number}\\n")
        sys.stdout.flush()
threads = [threading.Thread(target=say, args=[thread]) for thread in range(8)]
for each in threads:
    each.start()
"""


def test_of_killed_processes_every_acknowledged_record_is_there_once_in_order(tmp_path: Path) -> None:
    draw = random.Random(0)
    acknowledged = 0
    for kill in range(6):
        folder = tmp_path / str(kill)
        command = [sys.executable, "-c", WRITER, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout
            first = writer.stdout.readline()
            time.sleep(draw.random() * 0.3)
            writer.kill()
            lines = [first, *writer.stdout]
        stored: dict[Place, bytes] = {}
        for path in sorted(folder.iterdir()):
            with closing(OutboxReader(path)) as file:
                for each in file.read(0):
                    if isinstance(each, Record):
                        stored[Place(file.id, each.number)] = each.payload
        said = [payload.split()[:2] for payload in stored.values()]
        by_thread = [[int(number) for thread, number in said if int(thread) == each] for each in range(8)]
        assert all(numbers == list(range(len(numbers))) for numbers in by_thread)
        for line in (each for each in lines if each.endswith("\n") and each.count(" ") == 3):
            thread, number, id_, place = line.split()
            assert stored[Place(id_, int(place))].startswith(f"{thread} {number} ".encode())
            acknowledged += 1
    assert acknowledged > 100
