"""A fine-tuning job and real workers: the process beside them finds their port, and takes files of theirs away."""

import json
from pathlib import Path

import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer import adapters
from tests.explorer.finetuning.test_reinforcement import ASKED, GRADER, prompt
from tests.explorer.running import eventually
from tests.explorer.test_main import attached_to, service, write_settings
from tuneloop.shared.experience import JobState
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import JobDraft
from tuneloop.shared.settings.loader import load_settings

pytestmark = pytest.mark.xdist_group("workers")


def test_a_job_asks_the_workers_over_loopback(tmp_path: Path, double: EngineDouble) -> None:
    look = {"explorer__workers": 2, "explorer__service_status_check_interval": 0.1}
    settings = write_settings(tmp_path, **look, model__lora={"rank": adapters.RANK}, **attached_to(double))
    adapters.write_base(tmp_path / "model")
    with service(settings) as (_, http):
        data = json.dumps(prompt("3+4=")).encode()
        form = {"purpose": "fine-tune"}
        file = http.post("/v1/files", files={"file": ("a.jsonl", data)}, data=form).json()["id"]
        ledger = Ledger.of(load_settings(settings))
        draft = JobDraft(
            tenant="default",
            model="t",
            parent=0,
            options={"buffer.group_by": "task", "buffer.group_size": 2, "gate.mode": "off"}
            | {"algorithm.algorithm_type": "grpo"},
            method="reinforcement",
            hyperparameters=ASKED | {"batch_size": 1},
            grader=GRADER,
            training_file=file,
            rows_in_all=1,
            total_steps=1,
            by="tests",
        )
        job = ledger.jobs.create(draft)
        ledger.jobs.change(job.id, JobState.QUEUED, "queued")
        task = f"{file}:1:{job.id}:0"
        eventually(lambda: len(ledger.files.samples("default", [task])) == 2)
        eventually(lambda: all(each.reward is not None for each in ledger.files.samples("default", [task])))
        assert ledger.jobs.get(job.id).state is JobState.RUNNING
        ledger.close()
