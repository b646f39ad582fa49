"""Fine-tuning jobs on files: each line is learnt once an epoch, whatever happens, and the end is told."""

import json
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import yaml

from tests.doubles.warm.process import TRAINING, WarmProcess
from tests.trainer.factories import Waited, commit, sample
from tests.trainer.fine_tuning import conversation, create_job, lines_of_rows, preference
from tuneloop.shared.errors import NotFinite
from tuneloop.shared.experience import JobState, PolicyState, State
from tuneloop.shared.ledger.files import FILES
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.codec import from_blob
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.trainer import file_jobs
from tuneloop.trainer.batches.tokenizer import tokenizer_of
from tuneloop.trainer.loop import TrainingLoop, run
from tuneloop.trainer.micro_batch import MicroBatch


@pytest.fixture
def train(adapted, ledger):
    """Trains until all jobs are over."""

    def until_over(chosen):
        class Over(Event):
            def is_set(self):
                return super().is_set() or not ledger.jobs.open()

        run(chosen, Over())

    return until_over


def _metrics(ledger, job):
    return [each.data for each in reversed(ledger.jobs.events(job.id, limit=200)) if each.data]


def test_each_line_is_learnt_once_an_epoch_and_the_job_ends_with_a_version(adapted, ledger, train):
    chosen = adapted()
    job = create_job(chosen, ledger, [conversation(n) for n in range(10)])
    train(chosen)
    over = ledger.jobs.get(job.id)
    assert (over.state, over.rows_taken, over.total_steps) == (JobState.SUCCEEDED, 20, 6)
    rows = lines_of_rows(ledger)
    assert sorted(name for name, _, _ in rows) == sorted(
        f"{n}:{job.id}:{epoch}" for epoch in (0, 1) for n in range(1, 11)
    )
    first, second = ([name.split(":")[0] for name, _, _ in part] for part in (rows[:10], rows[10:]))
    assert first != second
    assert sorted(first) == sorted(second)
    made = [(each.step, each.consumed) for each in ledger.versions.of(job.policy).now().versions if each.consumed]
    assert made == [(3, 10), (6, 10)]
    assert over.version == ledger.versions.of(job.policy).newest().version
    assert [each["step"] for each in _metrics(ledger, job)] == [1, 2, 3, 4, 5, 6]
    assert ledger.policies.get(job.policy).state is PolicyState.PAUSED
    assert ledger.reports.imbalance() == []
    assert over.trained_tokens > 0


def test_a_pair_is_learnt_together_and_loses_are_told_on_the_validation_file(adapted, ledger, train):
    chosen = adapted()
    lines, held_out = [preference(n) for n in range(6)], [preference(n) for n in range(20, 23)]
    job = create_job(chosen, ledger, lines, method="dpo", validation=held_out, batch_size=2, n_epochs=3)
    train(chosen)
    assert ledger.jobs.get(job.id).state is JobState.SUCCEEDED
    rows = lines_of_rows(ledger)
    versions = {name: {version for each, _, version in rows if each == name} for name, _, _ in rows}
    assert len(versions) == 18
    assert all(len(each) == 1 for each in versions.values())
    metrics = _metrics(ledger, job)
    losses = [each["train_loss"] for each in metrics if "train_loss" in each]
    held = [(each["step"], each["full_valid_loss"]) for each in metrics if "full_valid_loss" in each]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5)
    assert [step for step, _ in held] == [0, 3, 6, 9]
    assert held[0][1] == pytest.approx(np.log(2), abs=1e-5)
    assert held[-1][1] < held[0][1] - 0.01
    assert len(rows) == 36  # of the validation file there are none


def test_each_answer_of_a_conversation_is_learnt_behind_what_came_before_it(adapted, ledger, train):
    """But for one of weight 0; the answers of a line are one sequence."""
    chosen = adapted()
    lines = [conversation(n, turns=3) for n in range(4)]
    lines[0]["messages"][2]["weight"] = 0
    create_job(chosen, ledger, lines, n_epochs=1, batch_size=11)
    train(chosen)
    rows = ledger.transactions.read(experiences.select().order_by(experiences.c.id))
    assert Counter(row.msg_id.split(":")[1] for row in rows) == {"1": 2, "2": 3, "3": 3, "4": 3}
    [second] = [row for row in rows if row.msg_id.split(":")[1:] == ["2", *row.msg_id.split(":")[2:4], "1"]]
    words = tokenizer_of(chosen)
    prompt, reply = (words.decode(each) for each in from_blob(second.blob)[:2])
    assert (prompt, reply, second.text) == ("Add.1+0?1.1+1?", "2.<end>", "2.")


def test_lines_that_are_too_long_are_left_out_and_named(adapted, ledger, train):
    chosen = adapted()
    lines = [conversation(n, answer="x" * 300 if n in {3, 5} else "Yes.") for n in range(8)]
    job = create_job(chosen, ledger, lines)
    train(chosen)
    assert ledger.jobs.get(job.id).state is JobState.SUCCEEDED
    [warning] = [each.message for each in ledger.jobs.events(job.id, limit=100) if each.level == "warn"]
    assert warning.startswith("2 lines are skipped, too long:")
    assert warning.endswith(": 4, 6")
    assert len(lines_of_rows(ledger)) == 12


@pytest.mark.parametrize("cause", ["all too long", "gone", "mistake", "refused", "not finite", "stopped", "rejected"])
def test_a_job_that_cannot_go_on_fails_with_a_sentence(adapted, ledger, train, cause, monkeypatch):
    chosen = adapted()
    answer = "x" * 300 if cause == "all too long" else None
    lines = [conversation(n, answer=answer) for n in range(16 if cause == "stopped" else 5)]
    job = create_job(chosen, ledger, lines)
    file = chosen.job_dir / FILES / job.training_file
    if cause == "gone":
        file.unlink()
    elif cause == "mistake":
        file.write_text("".join(f"{json.dumps(each)}\n" for each in [*map(conversation, range(4)), "nothing"]))
    elif cause == "refused":
        ledger.policies.set_options(job.policy, {"algorithm.algorithm_type": "none of ours"})
    elif cause in {"not finite", "stopped"}:

        def never(*_, **__):
            raise NotFinite("the gradient's norm is nan")

        monkeypatch.setattr(MicroBatch, "step", never)
    elif cause == "rejected":
        register = ledger.training.register

        def rejected(epoch, ids, **how):
            version = register(epoch, ids, **how)
            ledger.versions.of(job.policy).reject(version, "its probe differs")
            return version

        monkeypatch.setattr(ledger.training, "register", rejected)
        monkeypatch.setattr(Ledger, "of", lambda _: ledger)
        monkeypatch.setattr(ledger, "close", lambda: None)
    train(chosen)
    failed = ledger.jobs.get(job.id)
    assert failed.state is JobState.FAILED
    said = {"all too long": "too long", "gone": "No such file", "mistake": "line 5", "refused": "algorithm_type"}
    said |= {"not finite": "norm is nan", "stopped": "norm is nan", "rejected": "probe differs"}
    assert said[cause] in failed.error["message"]
    assert ledger.policies.get(job.policy).state is PolicyState.PAUSED
    counts = ledger.reports.counts()
    assert counts[State.COMMITTED] == counts[State.LEASED] == 0


@pytest.fixture
def until_told(adapted, ledger, monkeypatch):
    """Trains until an event of a job begins so, and then brings the job to a state, as the API does."""

    def train(chosen, job, begin, state):
        note = ledger.jobs.note

        def change(job_id, message, **how):
            note(job_id, message, **how)
            if message.startswith(begin):
                ledger.jobs.change(job_id, state, "Somebody said so")
                ledger.policies.pause(job.policy)

        monkeypatch.setattr(file_jobs, "_LINES", 4)
        monkeypatch.setattr(file_jobs, "_BATCHES", 1)
        with monkeypatch.context() as patched:
            patched.setattr(ledger.jobs, "note", change)
            waited = Waited()
            patched.setattr(waited, "is_set", lambda: waited.has_waited and ledger.jobs.get(job.id).state is state)
            TrainingLoop(chosen, ledger, waited).run()

    return train


def test_what_is_paused_stands_still_and_goes_on_where_it_was(adapted, ledger, train, until_told):
    chosen = adapted()
    job = create_job(chosen, ledger, [conversation(n) for n in range(12)])
    until_told(chosen, job, "Step 2/", JobState.PAUSED)
    assert ledger.versions.of(job.policy).newest().step == 2
    assert len(lines_of_rows(ledger)) <= 12
    ledger.jobs.change(job.id, JobState.QUEUED, "Resumed")
    ledger.policies.pause(job.policy, paused=False)
    train(chosen)
    assert ledger.jobs.get(job.id).state is JobState.SUCCEEDED
    assert Counter(name.split(":")[0] for name, _, _ in lines_of_rows(ledger)) == {str(n): 2 for n in range(1, 13)}


def test_what_is_cancelled_stops_at_once_and_keeps_its_versions(adapted, ledger, until_told):
    chosen = adapted()
    job = create_job(chosen, ledger, [conversation(n) for n in range(12)])
    until_told(chosen, job, "Step 5/", JobState.CANCELLED)
    versions = [each.step for each in ledger.versions.of(job.policy).now().versions if each.consumed]
    assert versions == [3, 5]
    assert all(each.path.exists() for each in ledger.versions.of(job.policy).now().versions)
    assert sum(version is not None for _, _, version in lines_of_rows(ledger)) == 20


def test_all_versions_of_a_job_are_kept_until_its_policy_is_deleted(adapted, ledger, train):
    chosen = adapted(trainer={"max_checkpoints_to_keep": 1})
    job = create_job(chosen, ledger, [conversation(n) for n in range(4)], n_epochs=4)
    train(chosen)
    commit(ledger, [sample(i) for i in range(12)])

    class Enough(Event):
        def is_set(self):
            return ledger.versions.newest().step >= 3

    run(chosen, Enough())
    places = [each.path.exists() for each in ledger.versions.of(job.policy).now().versions if each.consumed]
    assert places == [True] * 4
    ledger.policies.delete(job.policy, by="ops")
    commit(ledger, [sample(i) for i in range(12, 16)])
    Enough.is_set = lambda self: ledger.versions.newest().step >= 4
    run(chosen, Enough())
    assert not any(each.path.exists() for each in ledger.versions.all() if each.policy == job.policy and each.consumed)


def test_a_job_begins_with_a_version_and_is_held_back_by_it(adapted, ledger, train):
    """The first loss of dpo is log 2: policy and reference are the same."""
    chosen = adapted()
    first = create_job(chosen, ledger, [conversation(n) for n in range(8)], learning_rate_multiplier=20)
    train(chosen)
    parent = ledger.jobs.get(first.id).version
    second = create_job(
        chosen, ledger, [preference(n) for n in range(4)], method="dpo", name="file-2", parent=parent, n_epochs=1
    )
    train(chosen)
    assert ledger.jobs.get(second.id).state is JobState.SUCCEEDED
    losses = [each["train_loss"] for each in _metrics(ledger, second)]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)


#: Trainers, forked, for the imports take longest. Each kills itself at a random one of its writes, and of the files and
#: folders that it makes, but for the last, which ends when all jobs are over.
TRAINERS = """
import os, random, signal, sys
from threading import Event
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.trainer import fine_tuning
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import Transactions
from tuneloop.shared.settings.loader import load_settings
from tuneloop.trainer.batches.tokenizer import tokenizer_of
from tuneloop.trainer.loop import TrainingLoop, run
from tuneloop.trainer.micro_batch import MicroBatch

random.seed(int(sys.argv[3]))
kills = int(sys.argv[4])
for number in range(kills + 1):
    moment = random.randrange(1, 110)
    if not (child := os.fork()):
        left = moment

        def count(*_):
            global left
            left -= 1
            if not left and number < kills:
                os.kill(os.getpid(), signal.SIGKILL)

        begin = Transactions.write

        def write(self, *args, **how):
            count()
            found = begin(self, *args, **how)
            return found

        Transactions.write = write
        sys.addaudithook(lambda name, _: name in {"os.rename", "os.mkdir", "os.replace", "open"} and count())
        settings = load_settings(Path(sys.argv[2]), [])
        ledger = Ledger.of(settings)

        class Over(Event):
            def is_set(self):
                return super().is_set() or not ledger.jobs.open()

        run(settings, Over())
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.contract
@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_a_job_that_is_killed_twenty_times_loses_no_row_and_trains_none_twice(adapted, ledger, tmp_path, method):
    """Beside a default policy that trains on traffic."""
    config = tmp_path / "trainer.yaml"
    chosen = adapted()
    config.write_text(yaml.safe_dump(chosen.model_dump(mode="json", exclude_unset=True)))
    lines = [(conversation if method == "supervised" else preference)(n) for n in range(36)]
    job = create_job(chosen, ledger, lines, method=method, batch_size=2)
    commit(ledger, [sample(i) for i in range(40)])
    command = [sys.executable, "-c", TRAINERS, str(Path(__file__).parents[2]), str(config), "7", "20"]
    with (tmp_path / "log").open("w") as log:
        process = WarmProcess(command, modules=TRAINING, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        codes = process.stdout.read().split()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()
    assert codes.count("-9") == 20, (tmp_path / "log").read_text()
    assert codes[-1] == "0", (tmp_path / "log").read_text()
    assert ledger.jobs.get(job.id).state is JobState.SUCCEEDED
    rows = lines_of_rows(ledger)
    each = 1 if method == "supervised" else 2
    assert Counter(name for name, _, _ in rows) == {
        f"{n}:{job.id}:{epoch}": each for n in range(1, 37) for epoch in range(2)
    }
    assert all(version for _, _, version in rows)
    assert ledger.reports.imbalance() == []
    consumed = sum(each.consumed for each in ledger.versions.of(job.policy).now().versions)
    assert consumed == 72 * each
    steps = [each["step"] for each in _metrics(ledger, job) if "train_loss" in each]
    assert steps == sorted(set(steps))
