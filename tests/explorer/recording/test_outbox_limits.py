import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tuneloop.explorer.recorder import FILE_BYTES, RESERVE_BYTES, OutboxLimits
from tuneloop.runner.outbox import Outbox, names_in
from tuneloop.shared.errors import LedgerForbidden, StorageFull
from tuneloop.shared.outbox_status import OutboxStatus

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
def test_a_disk_is_not_filled_to_its_last_byte(own: Outbox, free: int, total: int) -> None:
    found = limits(own, disk=disk(free + 100, total))
    found.admit()
    own.append([b"x" * 200])
    with pytest.raises(StorageFull, match="the disk of the outbox"):
        found.admit()


@pytest.mark.parametrize(("free", "files"), [(RESERVE_BYTES + 2 * FILE_BYTES, 1), (RESERVE_BYTES + FILE_BYTES // 2, 2)])
def test_on_a_disk_with_little_room_files_are_let_go_soon(
    own: Outbox, monkeypatch: pytest.MonkeyPatch, free: int, files: int
) -> None:
    found, began = limits(own, disk=disk(free)), time.monotonic()
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
