"""The lines of a job's files are checked in the background, whatever becomes of the explorer meanwhile."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer import adapters
from tests.explorer.finetuning.job_service import LINES, TrainerDouble, check, job_service, put
from tests.explorer.running import RunningExplorer, eventually
from tuneloop.explorer import jobs
from tuneloop.shared.experience import JobState
from tuneloop.shared.finetuning.lines import FileCheck
from tuneloop.shared.ledger.files import FILES

pytestmark = pytest.mark.contract

PATH = "/v1/fine_tuning/jobs"


@pytest.fixture
def explorer(tmp_path: Path, double: EngineDouble) -> Iterator[RunningExplorer]:
    with job_service(adapters.adapted(tmp_path, double)) as running:
        yield running


def create(explorer: RunningExplorer, **but: Any) -> str:
    made = explorer.http.post(PATH, json={"model": MODEL} | but).json()
    assert made["status"] == "validating_files"
    return str(made["id"])


def until(explorer: RunningExplorer, job: str, state: str) -> dict[str, Any]:
    eventually(lambda: explorer.http.get(f"{PATH}/{job}").json()["status"] == state)
    found: dict[str, Any] = explorer.http.get(f"{PATH}/{job}").json()
    return found


class Gate:
    """Holds the checks until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        patch.setattr(jobs, "check_file", self)

    def __call__(self, path: Path, method: str, *, most: int = 20) -> FileCheck:
        self.entered.set()
        assert self.open.wait(60)
        return check(path, method, most=most)


@pytest.mark.parametrize("field", ["training_file", "validation_file"])
def test_a_broken_line_fails_the_job_with_its_number(explorer: RunningExplorer, field: str) -> None:
    lines: list[Any] = [*LINES * 6]
    lines[16] = b'{"messages": [}'
    files = {"training_file": put(explorer)} | {field: put(explorer, lines)}
    job = until(explorer, create(explorer, **files), "failed")
    assert (job["error"]["code"], job["error"]["param"]) == (f"invalid_{field}", field)
    assert "line 17: " in job["error"]["message"]
    assert job["finished_at"] is not None
    events = explorer.http.get(f"{PATH}/{job['id']}/events").json()["data"]
    assert ("error", True) in {(each["level"], "line 17" in each["message"]) for each in events}


def test_of_many_mistakes_the_first_are_named_and_a_file_without_lines_fails(explorer: RunningExplorer) -> None:
    job = until(explorer, create(explorer, training_file=put(explorer, [b"{"] * 9)), "failed")
    said = job["error"]["message"]
    assert said.startswith("line 1: ")
    assert ("line 5: " in said, "line 6: " in said, "4 more" in said) == (True, False, True)

    job = until(explorer, create(explorer, training_file=put(explorer, [])), "failed")
    assert re.search("has no lines|is empty", job["error"]["message"])


@pytest.mark.parametrize("how", ["deleted", "gone", "bug"])
def test_a_file_that_cannot_be_checked_fails_its_job_with_a_sentence(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate = Gate(monkeypatch)
    before = create(explorer, training_file=put(explorer))
    assert gate.entered.wait(60)
    file = put(explorer)
    job = create(explorer, training_file=file)
    if how == "deleted":
        explorer.ledger.files.delete(file)
    else:
        (explorer.settings.job_dir / FILES / file).unlink()
        if how == "bug":
            (explorer.settings.job_dir / FILES / file).write_bytes(b"\xff")
    gate.open.set()
    if how == "bug":
        monkeypatch.setattr(jobs, "check_file", lambda *_, **__: 1 / 0)
    error = until(explorer, job, "failed")["error"]
    sentence = {"deleted": "was deleted before", "gone": "cannot be read: No such file", "bug": "an internal error"}
    assert sentence[how] in error["message"] or (how == "bug" and "not a line" in error["message"])
    assert str(explorer.settings.job_dir) not in error["message"]
    assert until(explorer, before, "queued")["error"] is None


def test_a_job_that_is_cancelled_while_its_files_are_checked_stays_cancelled(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    job = create(explorer, training_file=put(explorer))
    assert gate.entered.wait(60)
    assert explorer.http.post(f"{PATH}/{job}/pause").status_code == 400
    assert explorer.http.post(f"{PATH}/{job}/cancel").json()["status"] == "cancelled"
    gate.open.set()
    other = create(explorer, training_file=put(explorer))
    until(explorer, other, "queued")
    assert until(explorer, job, "cancelled")["error"] is None


@pytest.mark.parametrize("state", [*JobState])
def test_a_restart_of_the_explorer_loses_no_job(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch, state: JobState
) -> None:
    settings = adapters.adapted(tmp_path, double)
    with job_service(settings) as explorer:
        trainer = TrainerDouble(explorer.ledger, settings)
        if state is JobState.VALIDATING:
            with explorer.ledger.transactions.write() as connection:
                connection.exec_driver_sql(
                    "INSERT INTO explorers (name, address, release, seen_at, lead_epoch, leads_until)"
                    " VALUES ('another:1', '', '', 0, 1, 1e12)"
                )
        job = create(explorer, training_file=put(explorer))
        if state is not JobState.VALIDATING:
            until(explorer, job, "queued")
        if state in {JobState.RUNNING, JobState.PAUSED, JobState.CANCELLED}:
            trainer.step(trainer.begin(job), 1)
        if state in {JobState.PAUSED, JobState.CANCELLED}:
            explorer.http.post(f"{PATH}/{job}/{'pause' if state is JobState.PAUSED else 'cancel'}")
        if state is JobState.SUCCEEDED:
            trainer.train(job)
        if state is JobState.FAILED:
            explorer.ledger.jobs.change(job, state, "It failed", error={"code": "x", "message": "y", "param": None})
        before = explorer.ledger.jobs.get(job)
        with explorer.ledger.transactions.write() as connection:
            connection.exec_driver_sql("UPDATE explorers SET leads_until = 0")
        assert before.state is state
    with job_service(settings) as explorer:
        if state is JobState.VALIDATING:
            until(explorer, job, "queued")
        else:
            assert explorer.ledger.jobs.get(job) == before
        asked = {"succeeded": before.name, "cancelled": f"{before.name}:ckpt-step-1"}.get(state)
        for name in (before.name, f"{before.name}:ckpt-step-1"):
            answered = explorer.chat(model=name).status_code
            assert answered == (200 if asked and (name == asked or state is JobState.SUCCEEDED) else 404), name
