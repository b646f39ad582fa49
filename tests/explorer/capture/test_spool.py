import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuneloop.explorer.capture import spool
from tuneloop.explorer.capture.spool import Spool
from tuneloop.explorer.capture.spool_slots import FlushedMark
from tuneloop.shared import spool_format
from tuneloop.shared.errors import StorageFull
from tuneloop.shared.spool_format import Position

START = Position(0, 0)


def opened(root: Path, *, sync: bool = False) -> Spool:
    return Spool.open(root, sync=sync)


def payloads(folder: Path, start: Position = START) -> list[bytes]:
    return [payload for payload, _ in spool.read(folder, start)]


def marked(path: Path) -> Position:
    mark = FlushedMark(path)
    mark.close()
    return mark.position


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Spool]:
    found = opened(tmp_path)
    yield found
    found.close()


async def test_what_was_appended_is_read_in_order(own: Spool) -> None:
    await own.append([b"a", b"b"])
    end = await own.append([b"c"])
    assert payloads(own.folder) == [b"a", b"b", b"c"]
    assert end == own.end
    positions = [position for _, position in spool.read(own.folder, START)]
    assert payloads(own.folder, positions[0]) == [b"b", b"c"]
    assert payloads(own.folder, end) == []


async def test_a_new_process_begins_a_new_segment_and_reads_the_old(tmp_path: Path) -> None:
    for number in range(3):
        found = opened(tmp_path)
        await found.append([b"%d" % number])
        found.close()
    assert spool_format.segments(found.folder) == [1, 2, 3]
    assert payloads(found.folder) == [b"0", b"1", b"2"]


async def test_zeros_at_the_end_are_no_records(tmp_path: Path) -> None:
    found = opened(tmp_path)
    await found.append([b"whole"])
    found.close()
    with (tmp_path / "0" / "00000001.seg").open("ab") as file:
        file.write(bytes(4096))
    assert payloads(tmp_path / "0") == [b"whole"]


async def test_a_damaged_segment_is_not_forgotten_for_good(tmp_path: Path) -> None:
    found = opened(tmp_path)
    await found.append([b"whole", b"damaged", b"behind it"])
    found.close()
    path = tmp_path / "0" / "00000001.seg"
    data = path.read_bytes().replace(b"damaged", b"dAmaged")
    path.write_bytes(data)
    assert payloads(tmp_path / "0") == [b"whole"]
    spool.forget(tmp_path / "0", Position(2, 0))
    assert spool_format.segments(tmp_path / "0") == []
    assert (tmp_path / "0" / "00000001.torn").read_bytes() == data


@pytest.mark.parametrize("lost", range(1, 12))
async def test_a_torn_tail_is_passed_over(tmp_path: Path, lost: int) -> None:
    found = opened(tmp_path)
    await found.append([b"whole", b"torn"])
    found.close()
    path = tmp_path / "0" / "00000001.seg"
    os.truncate(path, path.stat().st_size - lost)
    again = opened(tmp_path)
    await again.append([b"after"])
    again.close()
    assert payloads(again.folder) == [b"whole", b"after"]


async def test_segments_rotate_and_are_forgotten(tmp_path: Path) -> None:
    own = Spool(tmp_path / "0", sync=False, segment_bytes=100)
    ends = [await own.append([b"%02d" % number * 20]) for number in range(12)]
    assert len(spool_format.segments(own.folder)) == 4
    assert payloads(own.folder) == [b"%02d" % number * 20 for number in range(12)]
    own.flushed.move(ends[5])
    spool.forget(own.folder, ends[5])
    assert payloads(own.folder, ends[5]) == [b"%02d" % number * 20 for number in range(6, 12)]
    assert len(spool_format.segments(own.folder)) == 3
    assert own.backlog_bytes() == 6 * 48
    own.close()


@pytest.mark.parametrize("torn", [0, 1])
def test_the_mark_survives_a_torn_place(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "flushed"
    mark = FlushedMark(path)
    mark.move(Position(1, 10))
    mark.move(Position(2, 20))
    mark.close()
    data = bytearray(path.read_bytes())
    data[torn * 16 + 3] ^= 0xFF
    path.write_bytes(data)
    again = FlushedMark(path)
    assert again.position == (Position(2, 20), Position(1, 10))[torn]
    again.move(Position(3, 30))  # over the torn place, not over the good one
    again.close()
    assert marked(path) == Position(3, 30)


def test_a_writer_killed_at_any_moment_loses_nothing_acknowledged(tmp_path: Path) -> None:
    seeded = random.Random(0)
    acknowledged: set[int] = set()
    for turn in range(4):
        root = tmp_path / str(turn)
        command = [sys.executable, "-m", "tests.explorer.capture.spooling", str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            first = writer.stdout.readline()
            time.sleep(seeded.uniform(0.02, 0.3))
            writer.send_signal(signal.SIGKILL)
            *said, _ = (first + writer.stdout.read()).split(b"\n")
        acknowledged = {int(number) for number in said}
        found = {int(payload.rstrip(b".")) for payload in payloads(root / "0")}
        assert acknowledged
        assert acknowledged <= found


_FULL = """
import asyncio, resource, signal, sys
from pathlib import Path
from tuneloop.explorer.capture import spool
from tuneloop.explorer.capture.spool import Spool
from tuneloop.shared.spool_format import Position
from tuneloop.shared.errors import StorageFull

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

async def main(full, room):
    own = Spool.open(Path(sys.argv[1]), sync=True)
    kept = [b"%d" % number for number in range(20)]
    await asyncio.gather(*(own.append([each]) for each in kept))
    full()
    refused = 0
    for _ in range(5):
        try:
            await own.append([b"x" * 5000])
        except StorageFull:
            refused += 1
    assert refused == 5, refused
    own.flushed.move(Position(1, 9))  # the mark moves all the same
    room()
    await own.append([b"again"])
    assert [payload for payload, _ in spool.read(own.folder, Position(0, 0))] == [*kept, b"again"]
    own.close()

"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="only root may mount")
def test_a_full_disk_is_refused_and_recovered_from(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=8", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("no mounts here")
    # Neither bytes nor inodes are left, so no new segment can be made either.
    script = (
        _FULL
        + """
hog = Path(sys.argv[1]) / "hog"
def full():
    with hog.open("wb", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass
    try:
        for number in range(99): (hog.parent / f"hog{number}").touch()
    except OSError: pass
def room():
    for path in hog.parent.glob("hog*"): path.unlink()
asyncio.run(main(full, room))
"""
    )
    try:
        subprocess.run([sys.executable, "-c", script, str(disk)], check=True, timeout=120)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("sync", [True, False])
async def test_a_folder_that_is_moved_away_takes_nothing_until_it_is_back(tmp_path: Path, sync: bool) -> None:
    own = opened(tmp_path / "spool", sync=sync)
    await own.append([b"a"])
    for moved in (own.folder, own.folder.parent):
        elsewhere = moved.rename(tmp_path / "elsewhere")
        with pytest.raises(StorageFull, match="was deleted or moved"):
            await own.append([b"b"])
        own.check()
        assert own.broken is not None
        elsewhere.rename(moved)
        await own.append([b"c"])
        assert own.broken is None
    assert payloads(own.folder) == [b"a", b"c", b"c"]
    own.close()
