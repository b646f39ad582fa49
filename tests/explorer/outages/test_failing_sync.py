"""A disk that fails to bring records to disk now and then: who is refused is told, and nobody else loses anything."""

import errno
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.explorer.running import RunningExplorer, eventually


def fail_every(patch: pytest.MonkeyPatch, nth: int) -> list[str]:
    """Let each so-manieth fsync of an outbox's file fail; the files that failed."""
    sync, counted, failed = os.fsync, itertools.count(1), list[str]()

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".records") and next(counted) % nth == 0:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    patch.setattr(os, "fsync", fsync)
    return failed


@pytest.mark.contract
def test_a_sync_that_fails_refuses_what_it_was_for_and_nothing_else(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = explorer.chat().json()["id"]
    failed = fail_every(monkeypatch, 1)
    refused = explorer.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_full")
    assert int(refused.headers["retry-after"]) > 0
    monkeypatch.undo()
    eventually(lambda: explorer.http.get("/health/ready").status_code == 200)
    second = explorer.chat().json()["id"]
    assert explorer.feedback(first, second).status_code == 200
    assert len(failed) == 1
    stored = [row.msg_id for row in explorer.rows("SELECT msg_id FROM experiences WHERE reward IS NOT NULL")]
    assert sorted(stored) == sorted([first, second])


@pytest.mark.contract
def test_through_many_syncs_that_fail_nothing_acknowledged_is_lost(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_every(monkeypatch, 12)

    def talk(_: int) -> tuple[list[str], list[str], int]:
        replies, rated, refusals = list[str](), list[str](), 0
        for _ in range(40):
            said = explorer.chat()
            refusals += said.status_code == 503
            if said.status_code == 200:
                replies.append(said.json()["id"])
                if explorer.feedback(replies[-1], reward=0.5).status_code == 200:
                    rated.append(replies[-1])
            else:
                eventually(lambda: explorer.http.get("/health/ready").status_code == 200)
        return replies, rated, refusals

    with ThreadPoolExecutor(6) as threads:
        said = list(threads.map(talk, range(6)))
    monkeypatch.undo()
    stored = explorer.rows("SELECT msg_id, reward FROM experiences")
    assert len(dict(stored)) == len(stored)
    assert {each for replies, _, _ in said for each in replies} <= dict(stored).keys()
    assert all(dict(stored)[each] == 0.5 for _, rated, _ in said for each in rated)
    assert len(set(failed)) >= 3
    assert sum(refusals for _, _, refusals in said) >= 3
    assert explorer.failures == []
