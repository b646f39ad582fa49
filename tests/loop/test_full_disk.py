"""The explorer's disk fills up in mid-traffic: users get 503 and when to come back; nothing acknowledged is lost."""

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from sqlalchemy import select

from tests.doubles import postgres
from tests.doubles.engine import EngineDouble
from tests.doubles.serving import serving
from tests.loop.harness.services import Service, alive, descendants, ledger_of, wait_for
from tests.loop.harness.users import Book, Failure, Users, attached_settings
from tuneloop.explorer.recorder import RESERVE_SHARE
from tuneloop.shared.ledger.storage.schema import experiences, feedback

pytestmark = pytest.mark.contract

LONG, LONGER = "x" * 5000, "x" * 20_000


@contextmanager
def explorer_of(folder: Path, outbox_dir: Path | None = None, **but: object) -> Iterator[Service]:
    """An explorer over an engine double; `but` are sections of the settings."""
    with serving(EngineDouble(piece_pause_s=0.002)) as url:
        config = attached_settings(folder, url, **but)
        values = yaml.safe_load(config.read_text())
        values["explorer"]["outbox_dir"] = str(outbox_dir or folder / "outbox")
        config.write_text(yaml.safe_dump(values))
        explorer = Service(config, "explorer")
        try:
            explorer.wait_until_ready()
            yield explorer
        finally:
            brood = descendants(explorer.process.pid)
            explorer.kill()
            wait_for(lambda: not any(map(alive, brood)), why="they still hold the disk")


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 2 MiB, or of the size asked for: for root only; a limit on a file's size is for everybody."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', '2m')}", "tmpfs", str(disk)], check=False
    ).returncode:
        pytest.skip("no mounts here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def limit(explorer: Service, size: int) -> None:
    """Let no file of its processes grow beyond `size`, as a full disk would not: outbox, database and log alike."""
    for pid in (explorer.process.pid, *descendants(explorer.process.pid)):
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def told_to_come_back(failure: Failure) -> bool:
    """Whether a user was told that nothing was stored: by a 503 with Retry-After, or within the stream."""
    if isinstance(failure.error, httpx.HTTPStatusError):
        reply = failure.error.response
        return reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
    return '"code":"storage_full"' in str(failure.error)


def refused(explorer: Service, book: Book) -> bool:
    """Whether a request is refused before it reaches an engine."""
    return bool(book.failures) and httpx.get(f"{explorer.url}/health/ready", timeout=60).status_code == 503


def assert_nothing_was_lost(explorer: Service, book: Book) -> None:
    ledger = ledger_of(explorer.settings)

    def lost() -> set[str]:
        with ledger.transactions.engine.connect() as connection:
            stored = set(connection.execute(select(experiences.c.msg_id)).scalars())
            heard = set(connection.execute(select(feedback.c.msg_id)).scalars())
        return (book.replies - stored) | (book.acknowledged.keys() - heard)

    wait_for(lambda: not lost(), why="it is not drained, or was lost")
    ledger.close()


def through_a_full_disk(
    explorer: Service, fill: Callable[[], None], empty: Callable[[], None], *, question: str = LONG
) -> Book:
    """What clients see while the disk fills up and is emptied again; the service is never restarted."""
    with Users(explorer.url, question=question) as users:
        book = users.book
        wait_for(lambda: len(book.acknowledged) > 20)
        fill()
        wait_for(lambda: refused(explorer, book), why="it is never refused")
        asked = users.question(stream=False) | {"store": False}
        unstored = httpx.post(f"{explorer.url}/v1/chat/completions", json=asked, timeout=60)
        assert unstored.status_code == 200, "what is not kept needs no room"
        failed = len(book.failures)
        wait_for(lambda: len(book.failures) > failed + 10, why="it takes something after all")
        count = len(book.replies)
        empty()
        wait_for(lambda: len(book.replies) > count + 20, why="it does not recover")
        # The bound is looked at every half a second, and may be near.
        wait_for(lambda: time.monotonic() > book.failures[-1].at + 2, why="it goes on failing")
        stopped_failing = time.monotonic()
        wait_for(lambda: len(book.acknowledged) > 40)
    assert explorer.process.poll() is None
    assert [each for each in book.failures if not told_to_come_back(each) or each.at > stopped_failing] == []
    return book


def test_a_disk_that_takes_no_more_in_the_middle_of_replies_costs_no_acknowledged_one(tmp_path: Path) -> None:
    with explorer_of(tmp_path) as explorer:

        def fill() -> None:
            limit(explorer, max(path.stat().st_size for path in explorer.settings.outbox_dir.iterdir()) + 100_000)

        book = through_a_full_disk(explorer, fill, lambda: limit(explorer, resource.RLIM_INFINITY))
        assert_nothing_was_lost(explorer, book)


# Large enough that its reserve holds what is answered between two looks at the disk.
@pytest.mark.parametrize("small_disk", ["32m"], indirect=True)
def test_a_disk_that_others_fill_refuses_before_it_is_full(tmp_path: Path, small_disk: Path) -> None:
    hog = small_disk / "hog"

    def fill() -> None:
        with hog.open("wb", buffering=0) as file:
            while (disk := os.statvfs(small_disk)).f_bavail >= RESERVE_SHARE * disk.f_blocks:
                file.write(bytes(4096))

    with explorer_of(tmp_path, outbox_dir=small_disk) as explorer:
        book = through_a_full_disk(explorer, fill, hog.unlink)
        assert all(isinstance(each.error, httpx.HTTPStatusError) for each in book.failures), "no reply broke off"
        assert_nothing_was_lost(explorer, book)


# Large enough that what is answered between two looks at the disk does not fill it anew.
@pytest.mark.postgres
@pytest.mark.parametrize("small_disk", ["8m"], indirect=True)
def test_a_disk_that_an_outage_fills_is_empty_again_after_it(tmp_path: Path, small_disk: Path) -> None:
    server = postgres.started()
    buffer = {"trainer_input": {"experience_buffer": {"path": server.url}}}
    with explorer_of(tmp_path, outbox_dir=small_disk, buffer=buffer) as explorer:
        book = through_a_full_disk(explorer, server.stop, server.start, question=LONGER)
        assert_nothing_was_lost(explorer, book)
    server.close()
