import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.running import eventually
from tests.factories import exchange, feedback
from tuneloop.explorer.capture.recorder import RESERVE_BYTES, SpoolLimits
from tuneloop.explorer.capture.spool import Spool
from tuneloop.shared import spool_format
from tuneloop.shared.errors import StorageFull
from tuneloop.shared.experience import encode
from tuneloop.shared.spool_format import Position

GIB = 1 << 30


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Spool]:
    found = Spool.open(tmp_path / "spool", sync=False)
    yield found
    found.close()


def limits(own: Spool, *, max_bytes: int = GIB, max_age_s: float = 3600.0, **more: Any) -> SpoolLimits:
    return SpoolLimits(own, max_bytes=max_bytes, max_age_s=max_age_s, **more)


def disk(free: int, total: int = 1000 * GIB) -> Callable[[Path], os.statvfs_result]:
    """A file system of that many bytes, whatever lies on it."""
    return lambda _path: os.statvfs_result((1, 1, total, free, free, 1, 1, 1, 0, 255))


async def test_the_bound_is_kept_until_the_database_has_caught_up(own: Spool) -> None:
    found = limits(own, max_bytes=100)
    found.admit()
    end = await own.append([b"x" * 200])
    with pytest.raises(StorageFull, match="100 bytes"):
        found.admit()
    own.flushed.move(end)
    found.admit()


async def test_what_other_processes_hold_counts_dead_or_alive(own: Spool) -> None:
    alive, dead = Spool.open(own.folder.parent, sync=False), Spool.open(own.folder.parent, sync=False)
    found = limits(own, max_bytes=600)
    for each in (own, alive, dead):
        await each.append([b"x" * 192])
    dead.close()
    found.admit()
    found.look()
    assert found.bytes() == 600
    with pytest.raises(StorageFull, match="600 bytes"):
        found.admit()
    alive.flushed.move(alive.end)
    found.look()
    found.admit()
    alive.close()


async def test_what_the_process_before_left_counts(own: Spool) -> None:
    again = Spool.open(own.folder.parent, sync=False)
    end = await again.append([b"x" * 92])
    again.close()
    again = Spool(again.folder, sync=False)
    await again.append([b"x" * 42])
    assert (again.backlog_bytes(), spool_format.backlog_of(again.folder)) == (150, 150)
    again.flushed.move(end)
    assert (again.backlog_bytes(), spool_format.backlog_of(again.folder)) == (50, 50)
    again.close()


@pytest.mark.parametrize(("free", "total"), [(RESERVE_BYTES, 1000 * GIB), (GIB // 20, GIB)])
async def test_a_disk_is_not_filled_to_its_last_byte(own: Spool, free: int, total: int) -> None:
    found = limits(own, disk=disk(free + 100, total))
    found.admit()
    await own.append([b"x" * 200])
    with pytest.raises(StorageFull, match="the disk of the spool"):
        found.admit()


async def test_on_a_full_disk_what_the_database_has_is_given_back(own: Spool) -> None:
    found = limits(own, disk=disk(0))
    own.flushed.move(await own.append([b"x" * 200]))
    found.look()
    eventually(lambda: own.end == Position(2, 0))
    found.look()
    await own.append([b"y"])
    assert own.end.segment == 2, "one that is empty already is kept"
    found.look()
    await own.append([b"z"])
    assert own.end.segment == 2, "so is one that the database has not taken"


async def test_the_age_is_that_of_the_oldest_record_in_any_slot(own: Spool) -> None:
    now = time.time()
    found = limits(own, max_age_s=50)
    assert found.oldest_s() == 0
    other = Spool.open(own.folder.parent, sync=False)
    end = await other.append([encode(exchange(received_at=now - 100, latency_s=60.0))])
    await other.append([encode(feedback(received_at=now - 20))])
    await own.append([encode(feedback(received_at=now - 30))])
    found.look()
    assert found.oldest_s() == pytest.approx(40, abs=5)
    found.admit()
    other.flushed.move(end)
    found.look()
    assert found.oldest_s() == pytest.approx(30, abs=5)
    other.close()
    own.flushed.move(own.end)
    found.look()
    assert found.oldest_s() == pytest.approx(20, abs=5)


async def test_what_has_waited_too_long_refuses_more(own: Spool) -> None:
    found = limits(own, max_age_s=50)
    end = await own.append([encode(feedback(received_at=time.time() - 60))])
    found.look()
    with pytest.raises(StorageFull, match="for 50 seconds"):
        found.admit()
    own.flushed.move(end)
    found.admit()
