"""Rows of files and uploads, on both databases."""

from pathlib import Path
from typing import Any

import pytest

from tests.factories import exchange, feedback
from tuneloop.shared.errors import FileRefused
from tuneloop.shared.experience import JobState, State
from tuneloop.shared.ledger.files import Files, StoredFile
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import JobDraft

ROW: dict[str, Any] = {"purpose": "fine-tune", "filename": "ä.jsonl", "bytes": 9, "created_by": "web"}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(ledger: Ledger) -> Clock:
    found = Clock()
    ledger.files._clock = found
    return found


def added(files: Files, name: str, *, tenant: str = "acme", keeps_s: float | None = None) -> StoredFile:
    return files.add(StoredFile(id=name, tenant=tenant, sha256="", created_at=0.0, expires_at=keeps_s, **ROW))


def test_files_of_one_moment_have_pages_too(ledger: Ledger, clock: Clock) -> None:
    for name in ("c", "a", "b", "d"):
        added(ledger.files, name)
    added(ledger.files, "x", tenant="umbra")

    def ids(**but: Any) -> tuple[list[str], bool]:
        asked: dict[str, Any] = {"purpose": None, "after": None, "order": "asc", "limit": 10}
        page = ledger.files.page("acme", **asked | but)
        return [each.id for each in page.files], page.more

    assert ids() == (["a", "b", "c", "d"], False)
    assert ids(order="desc", limit=3) == (["d", "c", "b"], True)
    assert ids(after="b") == (["c", "d"], False)
    assert ids(after="b", order="desc") == (["a"], False)
    assert ids(purpose="batch") == ([], False)
    with pytest.raises(FileRefused):
        ids(after="x")


def test_a_file_expires_and_is_known_as_gone(ledger: Ledger, clock: Clock) -> None:
    kept = added(ledger.files, "a", keeps_s=60.0)
    assert (kept.created_at, kept.expires_at) == (1000.0, 1060.0)
    assert ledger.files.find("a", "acme") == kept
    assert ledger.files.find("a", "umbra") is None
    assert ledger.files.find_needed(["a", "b"]) == {"a": True}
    clock.now = 1060.0
    assert ledger.files.find("a") is None
    assert ledger.files.find("a", deleted=True) == kept
    assert ledger.files.find_needed(["a", "b"]) == {"a": False}


def test_a_file_is_needed_until_the_last_job_is_over(ledger: Ledger, clock: Clock) -> None:
    ledger.versions.ensure_base(Path("/models/tiny"))
    for name in ("train", "valid", "other"):
        added(ledger.files, name)
        ledger.files.delete(name)
    common: dict[str, Any] = {"model": "t", "parent": 0, "options": {}, "method": "dpo", "hyperparameters": {}}
    draft = JobDraft(
        tenant="acme",
        training_file="train",
        validation_file="valid",
        rows_in_all=1,
        total_steps=1,
        by="tests",
        **common,
    )
    jobs = [ledger.jobs.create(draft).id for _ in range(2)]
    names = ["train", "valid", "other"]
    for job in jobs:
        assert ledger.files.find_needed(names) == {"train": True, "valid": True, "other": False}
        ledger.jobs.change(job, JobState.CANCELLED, "cancelled")
    assert ledger.files.find_needed(names) == dict.fromkeys(names, False)


def test_samples_are_found_by_their_tasks(ledger: Ledger) -> None:
    mine = exchange(task_id="file-1:3:job:0", run_id="1")
    ledger.recording.record(
        [mine, feedback(msg_id=mine.msg_id), exchange(task_id="file-1:3:job:0", tenant="umbra"), exchange()]
    )
    [found] = ledger.files.samples("acme", ["file-1:3:job:0", "none"])
    assert (found.msg_id, found.run_id, found.state, found.reward) == (mine.msg_id, "1", State.REWARDED, 1.0)


@pytest.mark.parametrize("name", ["file-A", "file-%", "file-_"])
def test_a_line_is_erased_by_its_exact_name(ledger: Ledger, name: str) -> None:
    theirs = exchange(msg_id=f"{name}:1:job:0")
    others = [exchange(msg_id=each) for each in ("file-a:1:job:0", "file-x:1:job:0", f"{name}:11:job:0")]
    ledger.recording.record([theirs, *others, exchange(tenant="umbra", task_id=f"{name}:1:job:0")])
    found = ledger.retention.erase_line("acme", name, 1)
    assert found.msg_ids == {theirs.msg_id}
    ledger.recording.record([theirs])
    assert ledger.retention.erase_line("acme", name, 1).msg_ids == set()
