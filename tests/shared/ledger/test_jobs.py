"""Fine-tuning jobs in the ledger: legal transitions alone, and a policy that follows its job and is followed by it."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.factories import committed, published
from tuneloop.shared.errors import JobRefused, PolicyRefused
from tuneloop.shared.experience import JobState, PolicyState, State
from tuneloop.shared.ledger.files import StoredFile
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.policies import OPEN, Job, JobDraft

#: As the words beside the states say.
LEGAL = {
    "validating_files": {"queued", "failed", "cancelled"},
    "queued": {"running", "paused", "failed", "cancelled"},
    "running": {"succeeded", "paused", "failed", "cancelled"},
    "paused": {"queued", "cancelled"},
}
ROAD = {
    "validating_files": (),
    "queued": ("queued",),
    "running": ("queued", "running"),
    "paused": ("queued", "paused"),
    "succeeded": ("queued", "running", "succeeded"),
    "failed": ("failed",),
    "cancelled": ("cancelled",),
}


@pytest.fixture
def based(ledger: Ledger) -> Ledger:
    ledger.versions.ensure_base(Path("/base"))
    for tenant in ("acme", "umbra"):
        fields = {"purpose": "fine-tune", "filename": "a", "bytes": 1, "sha256": "0" * 64, "created_at": 0.0}
        ledger.files.add(StoredFile(id=f"file-{tenant}", tenant=tenant, created_by="tests", **fields))
    return ledger


def make(ledger: Ledger, tenant: str = "acme", **but: Any) -> Job:
    fields: dict[str, Any] = {"model": "tiny", "parent": 0, "options": {}, "method": "supervised", "by": "tests"}
    more = {"hyperparameters": {"n_epochs": 1}, "rows_in_all": 4, "total_steps": 2}
    return ledger.jobs.create(JobDraft(tenant=tenant, training_file=f"file-{tenant}", **fields | more | but))


def bring(ledger: Ledger, job: Job, state: str) -> None:
    values: dict[str, Any] = {}
    if state == "succeeded":
        values = {"version": ledger.versions.of(job.policy).champion().version}
    if state == "failed":
        values = {"error": {"message": "m"}}
    ledger.jobs.change(job.id, JobState(state), "because", **values)


@pytest.mark.parametrize("before", ROAD)
def test_only_legal_transitions_happen(based: Ledger, before: str) -> None:
    for after in ROAD:
        job = make(based)
        for state in ROAD[before]:
            bring(based, job, state)
        policy, told = based.policies.get(job.policy).state, len(based.jobs.events(job.id))
        if after in LEGAL.get(before, ()):
            bring(based, job, after)
            assert len(based.jobs.events(job.id)) == told + 1
            trains = after in {"queued", "running"}
            policy = PolicyState.ACTIVE if trains else PolicyState.PAUSED
        else:
            with pytest.raises(JobRefused, match=f"the job is {before}, and cannot become {after}"):
                bring(based, job, after)
            assert len(based.jobs.events(job.id)) == told
        found = based.jobs.get(job.id)
        assert found.state == (after if after in LEGAL.get(before, ()) else before)
        assert based.policies.get(job.policy).state == policy
        assert (found.finished_at is None) == (found.state in OPEN)


def test_a_job_and_its_policy_follow_each_other(based: Ledger) -> None:
    job, other = make(based), make(based)
    bring(based, job, "queued")
    bring(based, other, "queued")
    based.policies.pause(job.policy)
    assert based.jobs.get(job.id).state is JobState.PAUSED
    based.policies.pause(job.policy, paused=False)
    assert based.jobs.get(job.id).state is JobState.QUEUED
    based.policies.delete(job.policy, by="ops")
    found = based.jobs.get(job.id)
    assert (found.state, found.finished_at is not None) == (JobState.CANCELLED, True)
    assert [each.message for each in based.jobs.events(job.id)][:3] == [
        "The job's policy was deleted by ops",
        "The job's policy is active",
        "The job's policy is paused",
    ]
    with pytest.raises(PolicyRefused):
        based.policies.pause(job.policy)
    assert based.jobs.get(other.id).state is JobState.QUEUED
    bring(based, other, "cancelled")
    based.policies.delete(other.policy, by="ops")
    assert based.jobs.get(other.id).state is JobState.CANCELLED


def test_what_waits_is_dropped_with_its_job_alone(based: Ledger) -> None:
    job, other = make(based), make(based)
    for each in (job, other):
        bring(based, each, "queued")
        committed(based, 2, policy=each.policy)
    bring(based, job, "paused")
    assert based.policies.waiting() == {job.policy: 2, other.policy: 2}
    bring(based, job, "cancelled")
    assert based.policies.waiting() == {other.policy: 2}
    assert based.reports.counts()[State.DROPPED] == 2
    assert based.reports.imbalance() == []


def step(ledger: Ledger, job: Job, number: int) -> int:
    committed(ledger, 1, policy=job.policy)
    epoch = ledger.training.take_epoch("trainer")
    [row] = ledger.training.lease(epoch, 1, BatchRules(policy=job.policy))
    return ledger.training.register(epoch, [row.id], step=number, publish=published, policy=job.policy)


def test_the_models_of_a_job_are_the_versions_that_it_made(based: Ledger) -> None:
    job = make(based, suffix="sums", base="Qwen/Qwen3")
    assert job.name == f"ft:Qwen/Qwen3:sums:{job.id.removeprefix('ftjob-')}"
    bring(based, job, "queued")
    bring(based, job, "running")
    first, second, third = (step(based, job, number) for number in (1, 2, 3))
    assert based.jobs.models()[job.policy].versions == {}, "none before it is over"
    based.jobs.note(job.id, "loss", data={"step": 2, "train_loss": 0.5})
    based.jobs.note(job.id, "validation", data={"step": 2, "full_valid_loss": 0.25})
    based.jobs.change(job.id, JobState.SUCCEEDED, "done", version=third)
    names = {f"{job.name}:ckpt-step-{number}": version for number, version in enumerate((first, second, third), 1)}
    assert based.jobs.models()[job.policy].versions == names | {job.name: third}
    found = based.jobs.checkpoints(job.id)
    assert [each.step for each in found] == [3, 2, 1]
    assert found[1].metrics == {"step": 2, "train_loss": 0.5, "full_valid_loss": 0.25}
    assert based.jobs.of_model(f"{job.name}:ckpt-step-2", "acme") == based.jobs.get(job.id)
    assert based.jobs.of_model(job.name, "umbra") is None
    line = based.versions.of(job.policy)
    line.promote(third)
    assert {each.version for each in line.answering()[job.policy]} >= {first, second, third}
    line.roll_back(third, by="ops", reason="worse")
    assert job.name not in based.jobs.models()[job.policy].versions
    based.policies.delete(job.policy, by="ops")
    assert based.jobs.models() == {}


def test_jobs_are_listed_newest_first_and_by_their_metadata(based: Ledger) -> None:
    made = [make(based, metadata={"n": str(n % 2), 'x"n': "1"}) for n in range(4)]
    theirs = make(based, "umbra")
    with based.transactions.write() as connection:  # many are made in one moment
        connection.execute(text("UPDATE jobs SET created_at = 5"))
    ids = sorted((each.id for each in made), reverse=True)
    assert [each.id for each in based.jobs.page("acme")] == ids
    assert [each.id for each in based.jobs.page("acme", after=ids[1])] == ids[2:]
    odd = {made[1].id, made[3].id}
    assert {each.id for each in based.jobs.page("acme", keep={"n": "1"})} == odd
    assert list(based.jobs.page("acme", keep={"n": "2"})) == []
    assert {each.id for each in based.jobs.page(None)} == {*ids, theirs.id}
    with pytest.raises(JobRefused):
        based.jobs.page("umbra", after=ids[0])
    assert based.jobs.counts()[JobState.VALIDATING] == 5
