"""`tuneloop jobs`: all tenants' jobs, and what an operator does with them."""

import json
from pathlib import Path

import pytest

from tests.cli.operations.conftest import Run
from tests.cli.operations.test_policies import file  # noqa: F401
from tests.shared.ledger.test_jobs import make
from tuneloop.shared.errors import JobRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.ledger.files import StoredFile
from tuneloop.shared.ledger.ledger import Ledger


@pytest.fixture
def based(ledger: Ledger) -> Ledger:
    ledger.versions.ensure_base(Path("/base"))
    fields = {"purpose": "fine-tune", "filename": "a", "bytes": 1, "sha256": "0" * 64, "created_at": 0.0}
    ledger.files.add(StoredFile(id="file-acme", tenant="acme", created_by="tests", **fields))
    return ledger


def test_jobs_are_listed_shown_and_changed(based: Ledger, run: Run) -> None:
    job = make(based).id
    for state in (JobState.QUEUED, JobState.RUNNING):
        based.jobs.change(job, state, "on its road")
    based.jobs.note(job, "Step 1/2", data={"step": 1, "train_loss": 0.5})
    [row] = json.loads(run("jobs", "list", "--json").output)
    assert (row["id"], row["tenant"], row["state"], row["step"], row["loss"]) == (job, "acme", "running", 1, 0.5)
    assert f"{job} acme" in " ".join(run("jobs", "list").output.split())
    shown = json.loads(run("jobs", "show", job, "--json").output)
    assert [each["message"] for each in shown["events"]][-1] == "Step 1/2"
    assert "info  Step 1/2" in run("jobs", "show", job).output
    assert run("jobs", "pause", job).output == f"{job} is paused\n"
    assert json.loads(run("jobs", "resume", job, "--json").output)["state"] == "queued"
    with pytest.raises(JobRefused, match="the job is queued, not paused"):
        run("jobs", "resume", job)
    assert run("jobs", "cancel", job).output == f"{job} is cancelled\n"
    with pytest.raises(JobRefused, match="there is no fine-tuning job none"):
        run("jobs", "show", "none")
