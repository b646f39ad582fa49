"""An explorer with files in its folder, and a trainer's double that makes versions of jobs."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.explorer import adapters
from tests.explorer.running import RunningExplorer, explorer_running
from tuneloop.explorer import jobs
from tuneloop.shared.checkpoints import Probe
from tuneloop.shared.errors import JobRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.finetuning.job_plan import JobPlan
from tuneloop.shared.finetuning.lines import FileCheck, LineMistake
from tuneloop.shared.ledger.files import FILES, StoredFile
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Job
from tuneloop.shared.operations import job_requests
from tuneloop.shared.settings.settings import Settings

LINES = [
    {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(4)
]


def plan(settings: Settings, method: str, asked: Mapping[str, Any], *, lines: int, seed: int) -> JobPlan:
    """Two epochs, one step each, unless other numbers are asked for."""
    for name, value in asked.items() - {("reasoning_effort", "low")}:
        if (name == "beta" and method != "dpo") or (value != "auto" and (isinstance(value, str) or value <= 0)):
            raise JobRefused(f"{name}: {value} cannot be")
    defaults = {"n_epochs": 2, "batch_size": lines, "learning_rate_multiplier": 1.0}
    found = defaults | {name: value for name, value in asked.items() if value != "auto"}
    options = {"algorithm.algorithm_type": "sft"}
    return JobPlan(options, found, lines * found["n_epochs"], found["n_epochs"])


def check(path: Path, method: str, *, most: int = 20) -> FileCheck:
    """Lines must be JSON objects with messages."""
    mistakes = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            json.loads(line)["messages"]
        except (ValueError, LookupError, TypeError) as error:
            mistakes.append(LineMistake(number, f"not a line for {method}: {type(error).__name__}"))
    return FileCheck(len(lines), mistakes[:most])


@contextmanager
def job_service(settings: Settings) -> Iterator[RunningExplorer]:
    """The explorer, with doubles of the plan and of the check of lines."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (job_requests, jobs):
            patch.setattr(module, "plan_job", plan)
        patch.setattr(jobs, "check_file", check)
        with explorer_running(settings) as running:
            yield running


def put(explorer: RunningExplorer, lines: Sequence[Any] = LINES, *, tenant: str = "default", **but: Any) -> str:
    """A file of a tenant; a line that is bytes stands there as it is. The file's id."""
    data = b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)
    file_id = f"file-{secrets.token_hex(12)}"
    folder = explorer.settings.job_dir / FILES
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file_id).write_bytes(data)
    fields = {"purpose": "fine-tune", "filename": "data.jsonl", "bytes": len(data), "sha256": "0" * 64}
    said = {"created_at": 0.0, "created_by": "tests"}
    explorer.ledger.files.add(StoredFile(id=file_id, tenant=tenant, **fields | said | but))
    return file_id


class TrainerDouble:
    """Makes the versions of jobs as a trainer would, without learning anything."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self.ledger, self._settings = ledger, settings

    def begin(self, job_id: str) -> Job:
        return self.ledger.jobs.change(job_id, JobState.RUNNING, "The job is training")

    def step(self, job: Job, step: int, *, probe: Probe | None = None, **metrics: Any) -> int:
        """A version after a step, which is told of in an event."""
        place = self._settings.job_dir, self._settings.model.model_path
        number = adapters.register(self.ledger, *place, policy=job.policy, step=step, probe=probe)
        data = {"step": step, "train_loss": 1 / step} | metrics
        self.ledger.jobs.note(job.id, f"Step {step}/{job.total_steps}: training loss={1 / step:.2f}", data=data)
        return number

    def succeed(self, job: Job, version: int) -> Job:
        done = {"version": version, "trained_tokens": 123}
        return self.ledger.jobs.change(job.id, JobState.SUCCEEDED, "The job has successfully completed", **done)

    def train(self, job_id: str) -> list[int]:
        """All of it; the versions."""
        job = self.begin(job_id)
        made = [self.step(job, each + 1) for each in range(job.total_steps)]
        self.succeed(job, made[-1])
        return made
