"""Lines of files become rows, once each, on either database."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.factories import experience, feedback, published
from tuneloop.shared.errors import StaleEpoch
from tuneloop.shared.experience import Exchange, JobState, PolicyState, State
from tuneloop.shared.ledger.files import StoredFile
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.policies import Job, JobDraft
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.ledger.training.file_rows import FileChunk, FileRow

RULES = BatchRules(any_reply=True, batch_timeout=0.001)


@pytest.fixture
def job(ledger: Ledger) -> Job:
    ledger.versions.ensure_base(Path("/base"))
    made = {"bytes": 1, "sha256": "0", "created_at": 0.0, "created_by": "ops", "filename": "a", "purpose": "fine-tune"}
    ledger.files.add(StoredFile(id="file-1", tenant="acme", **made))  # type: ignore[arg-type]
    draft = JobDraft(
        tenant="acme",
        model="m",
        parent=0,
        options={},
        method="supervised",
        hyperparameters={"n_epochs": 1},
        training_file="file-1",
        rows_in_all=9,
        total_steps=3,
        by="ops",
    )
    return ledger.jobs.change(ledger.jobs.create(draft).id, JobState.QUEUED, "checked")


def lines(job: Job, *numbers: int, before: int = 0, rewards: tuple[float, ...] = (1.0,)) -> FileChunk:
    rows = [
        FileRow(
            Exchange(
                msg_id=f"file-1:{number}:{job.id}:0",
                tenant="acme",
                endpoint="file",
                request=b'{"messages": []}',
                received_at=0.0,
                latency_s=0.0,
                experiences=tuple(experience(choice=choice, unsampled="of a file") for choice in range(len(rewards))),
                policy=job.policy,
            ),
            rewards,
        )
        for number in numbers
    ]
    return FileChunk(before, before + len(numbers), rows, tokens=5 * len(numbers), warnings=["line 4 is left out"])


def rows_of(ledger: Ledger) -> list[Any]:
    return list(ledger.transactions.read(select(experiences).order_by(experiences.c.id)))


def test_rows_are_written_with_how_far_the_file_was_taken(ledger: Ledger, job: Job) -> None:
    epoch = ledger.training.take_epoch("trainer")
    assert ledger.file_rows.take(epoch, job, lines(job, 2, 1))
    after = ledger.jobs.get(job.id)
    assert (after.state, after.rows_taken, after.trained_tokens) == (JobState.RUNNING, 2, 10)
    assert [(row.msg_id.split(":")[1], row.state, row.reward) for row in rows_of(ledger)] == [
        ("2", State.COMMITTED, 1.0),
        ("1", State.COMMITTED, 1.0),
    ]
    assert "line 4 is left out" in {each.message for each in ledger.jobs.events(job.id) if each.level == "warn"}
    [waiting] = [each for each in ledger.training.waiting(10) if each.job]
    assert (waiting.job, waiting.rows, waiting.policy.id) == (job.id, 2, job.policy)
    assert ledger.reports.imbalance() == []


def test_the_same_lines_are_not_taken_twice_nor_by_a_stale_trainer_nor_of_an_ended_job(
    ledger: Ledger, job: Job
) -> None:
    epoch = ledger.training.take_epoch("trainer")
    assert ledger.file_rows.take(epoch, job, lines(job, 1))
    assert not ledger.file_rows.take(epoch, job, lines(job, 1))
    newer = ledger.training.take_epoch("another")
    with pytest.raises(StaleEpoch):
        ledger.file_rows.take(epoch, job, lines(job, 2, before=1))
    ledger.jobs.change(job.id, JobState.CANCELLED, "cancelled")
    assert not ledger.file_rows.take(newer, job, lines(job, 2, before=1))
    assert len(rows_of(ledger)) == 1


def test_two_replies_of_a_line_are_a_group_and_come_together(ledger: Ledger, job: Job) -> None:
    epoch = ledger.training.take_epoch("trainer")
    ledger.file_rows.take(epoch, job, lines(job, 3, 1, 2, rewards=(1.0, 0.0)))
    rules = RULES._replace(policy=job.policy, group_by="task", group_size=2)
    leased = ledger.training.lease(epoch, 4, rules)
    assert [(each.msg_id.split(":")[1], each.choice, each.reward) for each in leased] == [
        ("3", 0, 1.0),
        ("3", 1, 0.0),
        ("1", 0, 1.0),
        ("1", 1, 0.0),
    ]
    assert len({each.group_id for each in leased}) == 2


def test_rewards_of_files_are_not_recomputed_from_feedback_that_there_is_none_of(ledger: Ledger, job: Job) -> None:
    epoch = ledger.training.take_epoch("trainer")
    ledger.file_rows.take(epoch, job, lines(job, 1, 2))
    assert ledger.recording.recompute_rewards().changed == 0
    assert {row.state for row in rows_of(ledger)} == {State.COMMITTED}
    history = ledger.reply_histories.get(f"file-1:1:{job.id}:0")
    assert history is not None


def test_a_job_that_is_done_or_fails_ends_its_policys_training(ledger: Ledger, job: Job) -> None:
    epoch = ledger.training.take_epoch("trainer")
    ledger.file_rows.take(epoch, job, lines(job, 1, 2))
    [one] = ledger.training.lease(epoch, 1, RULES._replace(policy=job.policy))
    version = ledger.training.register(epoch, [one.id], step=1, publish=published, policy=job.policy)
    assert ledger.file_rows.are_left(job.policy)
    ledger.file_rows.fail(epoch, job, "its file is gone", code="invalid_file")
    failed = ledger.jobs.get(job.id)
    assert failed.error == {"code": "invalid_file", "message": "its file is gone", "param": "training_file"}
    assert [row.state for row in rows_of(ledger)] == [State.TRAINED, State.DROPPED]
    assert ledger.policies.get(job.policy).state is PolicyState.PAUSED
    assert not ledger.file_rows.are_left(job.policy)
    ledger.file_rows.complete(epoch, job, "too late", version=version)
    assert ledger.jobs.get(job.id).state is JobState.FAILED


def test_a_lease_of_a_job_that_was_cancelled_comes_back_as_dropped(ledger: Ledger, job: Job) -> None:
    epoch = ledger.training.take_epoch("trainer")
    ledger.file_rows.take(epoch, job, lines(job, 1))
    ledger.training.lease(epoch, 1, RULES._replace(policy=job.policy))
    ledger.jobs.change(job.id, JobState.CANCELLED, "cancelled")
    ledger.training.release(epoch)
    assert [row.state for row in rows_of(ledger)] == [State.DROPPED]


def test_imported_replies_are_released_with_what_they_were_rewarded_with(ledger: Ledger) -> None:
    aside = "imported: no token ids"
    said = [experience(drop_reason=aside, completion_ids=b"", logprobs=b"", text="Four."), experience(), experience()]
    for number, each in enumerate(said):
        exchange = Exchange(
            msg_id=f"m{number}",
            tenant="acme",
            endpoint="imported",
            request=b"{}",
            received_at=1.0,
            latency_s=0.0,
            experiences=(each,),
        )
        ledger.recording.record([exchange])
    ledger.recording.record([feedback(msg_id="m1", value=0.25, event_id="e1")])
    assert ledger.file_rows.release({"m0", "m1", "m2", "unknown"}, without_tokens=aside) == 3
    assert ledger.file_rows.release({"m0", "m1", "m2"}, without_tokens=aside) == 0
    assert [(row.state, row.reward) for row in rows_of(ledger)] == [
        (State.COMMITTED, 1.0),
        (State.COMMITTED, 0.25),
        (State.COMMITTED, 1.0),
    ]
    assert ledger.file_rows.find_texts(["m0"])["m0"].text == "Four."
