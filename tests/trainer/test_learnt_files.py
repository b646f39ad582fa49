"""What the commands let be learnt of files: `tuneloop finetune`, and `tuneloop import --train`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.documents.test_shell import commands_of
from tests.house.documents.page_files import DOCS, blocks_of
from tests.trainer.factories import eventually
from tests.trainer.fine_tuning import LORA, conversation, preference
from tuneloop.cli.imports import import_file
from tuneloop.cli.main import app
from tuneloop.shared.checkpoints import ADAPTER_WEIGHTS
from tuneloop.shared.errors import JobRefused
from tuneloop.shared.experience import JobState, State
from tuneloop.shared.ledger.storage.codec import from_blob
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.trainer.loop import run


@pytest.fixture
def config(settings, base, tmp_path):
    path = tmp_path / "tuneloop.yaml"
    chosen = settings(model={"model_path": base, "lora": LORA}, algorithm={"algorithm_type": "reinforce"})
    path.write_text(yaml.safe_dump(chosen.model_dump(mode="json", exclude_unset=True)))
    return path


def _write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return path


def test_a_file_becomes_a_version_with_its_loss_before_and_after(config, ledger, tmp_path, monkeypatch):
    _write(tmp_path / "data.jsonl", [conversation(n, answer="Yes.") for n in range(40)])
    monkeypatch.chdir(tmp_path)
    [command] = commands_of(next(blocks_of(DOCS / "files.md")), "tuneloop")
    flags = ["--epochs", "2", "--batch-size", "6", "--lr-multiplier", "5", "--suffix", "sums", "--json"]
    done = CliRunner().invoke(app, [*command, *flags])
    assert done.exit_code == 0, (done.output, done.exception)
    told = json.loads(done.stdout)
    job = ledger.jobs.get(told["job"])
    assert (job.state, job.version, job.name) == (JobState.SUCCEEDED, told["version"], told["model"])
    assert told["steps"] == 12  # of 36 lines: four are held out
    assert told["loss_after"] < told["loss_before"] - 0.1
    assert ":sums:" in told["model"]
    assert (ledger.versions.get(told["version"]).path / "actor" / ADAPTER_WEIGHTS).is_file()


def test_preferences_are_told_of_line_by_line(config, ledger, tmp_path):
    data = _write(tmp_path / "data.jsonl", [preference(n) for n in range(8)])
    held_out = _write(tmp_path / "held_out.jsonl", [preference(n) for n in range(9, 12)])
    flags = ["--method", "dpo", "--epochs", "1", "--batch-size", "4", "--validation", str(held_out)]
    done = CliRunner().invoke(app, ["finetune", str(data), "--config", str(config), *flags])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "Step 2/2: training loss=" in done.output
    assert "loss on the validation part: 0.6931 before, " in done.output
    [job] = ledger.jobs.page(None)
    assert f"ask for it as {job.name}" in done.output


def test_who_interrupts_it_is_told_how_to_go_on_and_a_trainer_does(config, ledger, tmp_path):
    data = _write(tmp_path / "data.jsonl", [conversation(n) for n in range(60)])
    command = [sys.executable, "-c", "from tuneloop.cli.main import main; main()", "finetune", str(data)]
    process = subprocess.Popen(
        [*command, "--config", str(config), "--epochs", "9", "--batch-size", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: any(each.data for job in ledger.jobs.open() for each in ledger.jobs.events(job.id)))
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    [job] = ledger.jobs.open()
    assert f"{job.id} waits. To go on: tuneloop train --config {config}" in error
    assert job.rows_taken < job.rows_in_all


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--epochs", "0"], "n_epochs: must be a whole number from 1 to 50"),
        (["--suffix", "x" * 65], "--suffix: has 65 characters; write 1 to 64"),
        (["--set", "model.lora.rank=0"], "all weights are trained here"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_job(config, ledger, tmp_path, flags, said):
    data = _write(tmp_path / "data.jsonl", [conversation(n) for n in range(4)])
    done = CliRunner().invoke(app, ["finetune", str(data), "--config", str(config), *flags])
    assert isinstance(done.exception, JobRefused)
    assert said in str(done.exception)
    assert list(ledger.jobs.page(None)) == []


def test_mistakes_of_a_file_are_told_by_their_lines(config, ledger, tmp_path):
    data = _write(tmp_path / "data.jsonl", [*map(conversation, range(16)), "no object", conversation(17)])
    done = CliRunner().invoke(app, ["finetune", str(data), "--config", str(config)])
    assert f"{data}:17: " in str(done.exception)


def test_imported_conversations_are_learnt_by_the_default_policy(settings, ledger, tmp_path):
    """By sft, as the chat template writes them; what cannot be written is dropped with the reason."""
    chosen = settings(algorithm={"algorithm_type": "sft", "kl_coef": 0.0}, trainer={"total_steps": 2})
    ledger.versions.ensure_base(chosen.model.model_path)
    lines = [conversation(n) for n in range(9)]
    lines[4]["messages"][2]["content"] = ""
    data = _write(tmp_path / "data.jsonl", lines)
    assert import_file(ledger, data, train=True).released == 9
    assert import_file(ledger, data, train=True).released == 0
    run(chosen, _Never())
    counts = ledger.reports.counts()
    assert (counts[State.TRAINED], counts[State.DROPPED]) == (8, 1)
    rows = ledger.transactions.read(experiences.select().order_by(experiences.c.id))
    assert {row.reward for row in rows} == {1.0}
    [dropped] = [row.reason for row in rows if row.state == State.DROPPED]
    assert dropped.startswith("imported as text: ")
    assert len(from_blob(rows[0].blob)[1]) == 0


class _Never:
    """Nobody stops the trainer; it ends with its steps."""

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> bool:
        return False


def test_import_train_is_refused_where_the_method_learns_from_samples_alone(config, tmp_path):
    data = _write(tmp_path / "data.jsonl", [conversation(1)])
    done = CliRunner().invoke(app, ["import", "--train", "-c", str(config), str(data)])
    assert "reinforce learns from other replies than those of files" in str(done.exception)
