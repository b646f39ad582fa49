"""The files of the outbox under damage, a bad disk, and people who move files: no acknowledged record is lost."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuneloop.runner.outbox import Damage, Outbox, OutboxFile, Record

pytestmark = pytest.mark.contract

SYNC = os.fsync
TWENTY = [b"record %d " % number + b"x" * number for number in range(20)]


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    found = Outbox(tmp_path, 1 << 20)
    yield found
    found.close()


def read(file: OutboxFile) -> tuple[list[bytes], int]:
    """The payloads of a file, and how many stretches of it are damaged."""
    found = list(file.read(0))
    payloads = [each.payload for each in found if isinstance(each, Record)]
    return payloads, sum(isinstance(each, Damage) for each in found)


def payloads_of(outbox: Outbox) -> list[bytes]:
    return [payload for file in outbox.files for payload in read(file)[0]]


def claimed(path: Path) -> OutboxFile:
    found = OutboxFile.claim(path)
    assert found is not None
    return found


def left_by(outbox: Outbox) -> Path:
    """The only file of an outbox, whose process has ended."""
    [file] = outbox.files
    outbox.close()
    return file.path


def test_records_are_read_in_their_order_with_their_numbers(outbox: Outbox) -> None:
    outbox.append(TWENTY[:7])
    outbox.append(TWENTY[7:])
    [file] = outbox.files
    found = [each for each in file.read(0) if isinstance(each, Record)]
    assert [(each.number, each.payload) for each in found] == list(enumerate(TWENTY, 1))
    assert [each.payload for each in file.read(found[4].end) if isinstance(each, Record)] == TWENTY[5:]


def test_a_bit_that_flips_in_any_byte_costs_one_record_alone(outbox: Outbox) -> None:
    outbox.append(TWENTY)
    path = left_by(outbox)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        file = claimed(path)
        found, damages = read(file)
        file.close()
        [lost] = set(TWENTY) - set(found)
        assert (len(found), damages) == (19, 1), place
        assert found == [each for each in TWENTY if each != lost]


def test_a_tail_that_is_torn_at_any_byte_costs_what_was_not_acknowledged(outbox: Outbox) -> None:
    outbox.append(TWENTY[:2])
    [file] = outbox.files
    acknowledged = file.end
    outbox.append(TWENTY[2:3])
    path = left_by(outbox)
    whole = path.read_bytes()
    for end in range(acknowledged + 1, len(whole)):
        path.write_bytes(whole[:end])
        file = claimed(path)
        assert read(file) == (TWENTY[:2], 1)
        file.close()


def test_what_a_client_says_does_not_pass_for_a_record(outbox: Outbox, tmp_path: Path) -> None:
    other = Outbox(tmp_path / "other", 1 << 20)
    other.append([b"I am a record"])
    forged = left_by(other).read_bytes()
    outbox.append([b"before " + forged + b" after"])
    path = left_by(outbox)
    whole = bytearray(path.read_bytes())
    whole[0] ^= 1
    path.write_bytes(whole)
    file = claimed(path)
    assert read(file) == ([], 1)
    file.close()


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_after_an_error_of_the_disk_a_new_file_is_begun(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> int:
        monkeypatch.undo()
        raise OSError(errno.EIO, "of the test")

    outbox.append([b"acknowledged"])
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="of the test"):
        outbox.append([b"refused"])
    outbox.append([b"said again"])
    assert len(outbox.files) == 2
    assert payloads_of(outbox) == [b"acknowledged", b"said again"]


def test_all_who_wait_for_a_sync_that_fails_are_told(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[OSError] = []

    def say(payload: bytes) -> None:
        try:
            outbox.append([payload])
        except OSError as error:
            errors.append(error)

    def refuse(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", refuse_again)
        for each in others:
            each.start()
        while len(outbox._waiting) < len(others):
            pass
        raise OSError(errno.ENOSPC, "of the test")

    def refuse_again(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", SYNC)
        raise OSError(errno.EIO, "of the test, too")

    others = [threading.Thread(target=say, args=[b"%d" % number]) for number in range(3)]
    outbox.append([b"acknowledged"])
    monkeypatch.setattr(os, "fsync", refuse)
    say(b"first")
    for each in others:
        each.join()
    assert sorted(str(error.errno) for error in errors) == sorted(map(str, [errno.ENOSPC, *[errno.EIO] * 3]))
    assert payloads_of(outbox) == [b"acknowledged"]


def test_many_threads_share_the_syncs(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = 0

    def slow(descriptor: int) -> None:
        nonlocal syncs
        syncs += 1
        if syncs == 2:
            while len(outbox._waiting) < 99:
                pass
        SYNC(descriptor)

    outbox.append([b"the first makes the file"])
    monkeypatch.setattr(os, "fsync", slow)
    syncs = 1
    threads = [threading.Thread(target=outbox.append, args=[[b"%d" % number]]) for number in range(100)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert syncs == 3
    assert len(payloads_of(outbox)) == 101


@pytest.mark.parametrize("loss", ["deleted", "copied back from yesterday"])
def test_a_file_that_is_taken_from_its_writer_takes_no_more(outbox: Outbox, loss: str) -> None:
    outbox.append([b"acknowledged"])
    [file] = outbox.files
    yesterday = file.path.read_bytes()
    file.path.unlink()
    if loss != "deleted":
        file.path.write_bytes(yesterday)
    with pytest.raises(OSError, match=r"was replaced|No such file"):
        outbox.append([b"refused"])
    outbox.append([b"said again"])
    assert payloads_of(outbox) == [b"acknowledged", b"said again"]


def test_a_file_of_a_living_process_is_not_claimed_and_one_of_a_dead_process_is(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tuneloop.runner.outbox import Outbox\n"
        "outbox = Outbox(Path(sys.argv[1]), 1000); outbox.append([b'said']); print('', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        writer.stdout.readline()
        [path] = tmp_path.iterdir()
        assert OutboxFile.claim(path) is None
        writer.kill()
    file = claimed(path)
    assert read(file) == ([b"said"], 0)
    file.close()


def test_a_link_is_no_file_and_a_linked_folder_stays_the_one_it_was(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "one")
    outbox = Outbox(link, 1000)
    link.unlink()
    link.symlink_to(tmp_path / "two")
    outbox.append([b"said"])
    [file] = outbox.files
    assert file.path.parent == tmp_path / "one"
    (tmp_path / "two" / "linked.records").symlink_to(file.path)
    outbox.close()
    with pytest.raises(OSError, match="symbolic links"):
        OutboxFile.claim(tmp_path / "two" / "linked.records")


def test_a_full_file_is_followed_by_another_and_a_taken_one_is_removed(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, 100)
    for each in TWENTY:
        outbox.append([each])
    assert len(outbox.files) > 5
    assert payloads_of(outbox) == TWENTY
    first, last = outbox.files[0], outbox.files[-1]
    assert outbox.remove(first)
    assert not first.path.exists()
    assert not outbox.remove(last)
    outbox.begin_new_file()
    assert outbox.remove(last)
    outbox.close()
