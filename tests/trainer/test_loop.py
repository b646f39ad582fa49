"""The loop against a real ledger: exactly once, to the bit, whatever happens on the way."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Event, Thread

import numpy as np
import pytest
from sqlalchemy import make_url
from structlog.testing import capture_logs

from tests.databases import put_file
from tests.trainer.factories import Waited, commit, eventually, points, run_until, sample
from tuneloop.shared.capacity.pace import find_pace
from tuneloop.shared.checkpoints import CheckpointStore, check_files, read_manifest
from tuneloop.shared.errors import DatabaseAway, EnvironmentRefused, LedgerError, LedgerUnavailable, StaleEpoch
from tuneloop.shared.experience import State, steady_clock
from tuneloop.shared.job_marks import step_rules_in, touch_committed
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.training.training import Training
from tuneloop.shared.telemetry.spans import span_of_reply, span_of_version
from tuneloop.trainer.loop import TrainingLoop, run
from tuneloop.trainer.monitoring.monitors import StepSpans


def _losses(chosen):
    return points(chosen.tensorboard_dir / "trainer", "actor/pg_loss")


def _files(ledger, version):
    row = ledger.versions.all()[version]
    return read_manifest(row.path, sha256=row.manifest_sha256).files


def _other(settings, tmp_path, **but):
    """A second experiment with its own ledger."""
    chosen = settings(**but).model_copy(update={"checkpoint_root_dir": tmp_path / "other"})
    put_file(chosen.database_url, "migrated")
    return chosen, Ledger(database.connect(chosen.database_url))


def test_rows_become_versions(settings, ledger):
    commit(ledger, [sample(i) for i in range(16)])
    chosen = settings(trainer={"total_steps": 3, "save_interval": 2})
    run(chosen, Event())
    versions = ledger.versions.all()
    assert [(each.version, each.step, each.consumed) for each in versions] == [(0, 0, 0), (1, 2, 8), (2, 3, 4)]
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 12, State.COMMITTED: 4}
    assert ledger.reports.imbalance() == []
    newest = versions[-1]
    manifest = read_manifest(newest.path, sha256=newest.manifest_sha256)
    check_files(newest.path, manifest)
    assert (manifest.version, manifest.parent, manifest.step, manifest.epoch) == (2, 1, 3, 1)
    assert step_rules_in(chosen.job_dir) == chosen.step_rules
    assert not list(chosen.job_dir.glob(".*"))


def test_what_is_committed_does_not_wait_for_the_next_look(settings, ledger):
    chosen, stop = settings(trainer={"poll_interval": 300.0, "total_steps": 1}), Waited()
    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(run, chosen, stop)
        try:
            eventually(lambda: trainer.done() or stop.has_waited)
            commit(ledger, [sample(i) for i in range(4)])
            touch_committed(chosen.job_dir)
            trainer.result(60)
        finally:
            stop.set()
    assert ledger.versions.newest().step == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restart_between_two_versions_changes_no_loss_and_no_weight(settings, ledger, tmp_path, dtype):
    """Stopped after step 3 of versions at 2 and 4: step 3 is made again of the same rows, and drawn once."""
    rows = [sample(i) for i in range(16)]
    straight, other = _other(settings, tmp_path, trainer={"total_steps": 4, "save_interval": 2, "dtype": dtype})
    commit(other, rows)
    run(straight, Event())

    chosen = settings(trainer={"save_interval": 2, "dtype": dtype})
    commit(ledger, rows[:12])
    run_until(chosen, lambda: chosen.tensorboard_dir.exists() and len(_losses(chosen)) == 3)
    assert ledger.reports.counts()[State.COMMITTED] == 4
    assert ledger.versions.newest().version == 1
    commit(ledger, rows[12:])
    run(settings(trainer={"save_interval": 2, "total_steps": 4, "dtype": dtype}), Event())

    assert _losses(chosen) == _losses(straight)
    assert _files(ledger, 2) == _files(other, 2)
    other.close()


def test_staleness_is_counted_in_versions(settings, ledger):
    commit(ledger, [sample(i) for i in range(8)])
    commit(ledger, [sample(i, version_min=1, version_max=2) for i in range(8, 11)])
    commit(ledger, [sample(11)])
    chosen = settings(trainer={"total_steps": 3})
    run(chosen, Event())
    folder = chosen.tensorboard_dir / "trainer"
    assert points(folder, "off_policy/staleness_max") == [(1, 0), (2, 1), (3, 2)]
    assert points(folder, "off_policy/staleness_mean")[2] == (3, pytest.approx(1.25))


def test_with_a_batch_timeout_a_step_is_what_there_is(settings, ledger):
    nothing = sample(1, completion_ids=np.array([], dtype=np.int32), logprobs=np.array([], dtype=np.float32))
    commit(ledger, [sample(0), nothing, sample(2)])
    chosen = settings(buffer={"train_batch_size": 64, "batch_timeout": 0.01}, trainer={"total_steps": 1})
    run(chosen, Event())
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 2, State.DROPPED: 1}


@pytest.mark.postgres
def test_a_trainer_that_starts_again_waits_for_its_database(settings, tmp_path, postgres_url):
    away = tmp_path / "away"
    url = make_url(postgres_url)
    real = url.query["host"]
    buffer = {"trainer_input": {"experience_buffer": {"path": str(url.update_query_dict({"host": str(away)}))}}}
    chosen = settings(buffer=buffer, trainer={"total_steps": 1})
    with pytest.raises(DatabaseAway):
        run(chosen, Event())
    (chosen.tensorboard_dir / "trainer").mkdir(parents=True)
    stop = Event()
    with ThreadPoolExecutor() as pool:
        trainer = pool.submit(run, chosen, stop)
        with pytest.raises(TimeoutError):
            trainer.result(1)
        away.symlink_to(real)
        ledger = Ledger(database.connect(postgres_url, schema="exp_buffer"))
        eventually(lambda: trainer.done() or _is_alive(ledger))
        stop.set()
        trainer.result(30)
    ledger.close()


def _is_alive(ledger):
    with suppress(LedgerError):
        return ledger.versions.newest().version == 0
    return False


def test_a_trainer_that_was_overtaken_stops_and_writes_nothing(settings, ledger):
    ledger.training = Overtaken(ledger.transactions, ledger.rewards)
    loop = TrainingLoop(settings(), ledger, Event())
    ledger.versions.ensure_base(settings().model.model_path)
    commit(ledger, [sample(i) for i in range(4)])
    with pytest.raises(StaleEpoch, match="epoch 2 has taken over"):
        loop.run()
    assert [each.version for each in ledger.versions.all()] == [0]
    assert not list(settings().job_dir.glob("global_step_*"))
    assert not list(settings().job_dir.glob(".*"))
    assert ledger.reports.counts()[State.COMMITTED] == 4


class Overtaken(Training):
    """Another trainer starts at the moment this one has a batch."""

    def lease(self, epoch, size, policy, *, held=()):
        rows = super().lease(epoch, size, policy, held=held)
        self.take_epoch("another")
        return rows


class Interrupted:
    """A part that says of the first call of some verbs that the database is away: before it was done, or after."""

    def __init__(self, part, verbs, *, late):
        self._part, self._late, self._left = part, late, set(verbs)

    def __getattr__(self, verb):
        call = getattr(self._part, verb)
        return partial(self._interrupted, verb, call) if verb in self._left else call

    def _interrupted(self, verb, call, *arguments, **named):
        self._left.remove(verb)
        if self._late:
            call(*arguments, **named)
        raise LedgerUnavailable("the connection was closed")


def interrupted(ledger, *, late):
    ledger = Ledger(ledger.transactions.engine)
    ledger.training = Interrupted(ledger.training, ("lease", "drop", "register", "extend"), late=late)
    ledger.alarms = Interrupted(ledger.alarms, ("clear",), late=late)
    return ledger


@pytest.mark.parametrize("late", [False, True])
def test_a_database_that_is_away_for_a_moment_costs_no_row_and_trains_none_twice(settings, ledger, tmp_path, late):
    nothing = sample(3, completion_ids=np.array([], dtype=np.int32), logprobs=np.array([], dtype=np.float32))
    rows = [sample(0), sample(1), sample(2), nothing, *[sample(i) for i in range(4, 18)]]
    straight, other = _other(settings, tmp_path, trainer={"total_steps": 4, "save_interval": 2})
    commit(other, rows)
    run(straight, Event())

    commit(ledger, rows)
    chosen = settings(trainer={"total_steps": 4, "save_interval": 2})
    ledger.versions.ensure_base(chosen.model.model_path)
    TrainingLoop(chosen, interrupted(ledger, late=late), Event()).run()

    assert ledger.reports.counts() == other.reports.counts()
    assert ledger.reports.imbalance() == []
    assert _losses(chosen) == _losses(straight)
    assert _files(ledger, 2) == _files(other, 2)
    other.close()


class Forgetting(Training):
    """A person is erased while the trainer learns from what they said."""

    def lease(self, epoch, size, policy, *, held=()):
        rows = super().lease(epoch, size, policy, held=held)
        if rows and not self.retention.erasures():
            self.retention.erase("t", "ann")
        return rows


def test_what_is_erased_while_it_is_trained_on_is_in_no_version_and_training_goes_on(settings, ledger):
    commit(ledger, [sample(i) for i in range(9)])
    with ledger.transactions.write() as connection:
        connection.exec_driver_sql("UPDATE exchanges SET user_id = 'ann' WHERE msg_id = 'm2'")
    chosen = settings(trainer={"total_steps": 2, "save_interval": 2})
    ledger.versions.ensure_base(chosen.model.model_path)
    ledger.training = Forgetting(ledger.transactions, ledger.rewards)
    ledger.training.retention = ledger.retention
    TrainingLoop(chosen, ledger, Event()).run()
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 8}
    assert [(each.version, each.step, each.consumed) for each in ledger.versions.all()] == [(0, 0, 0), (1, 2, 8)]
    assert not list(chosen.job_dir.glob(".*"))
    assert [step for step, _ in _losses(chosen)] == [1, 2]


class RejectingAll(Training):
    """An explorer that sees another folder refuses every version."""

    def register(self, epoch, ids, **how):
        version = super().register(epoch, ids, **how)
        self.versions.reject(version, "it is not below the explorer's folder")
        return version


def test_three_rejected_versions_in_a_row_stop_training_until_the_alarm_is_cleared(settings, ledger):
    commit(ledger, [sample(i) for i in range(32)])
    chosen, stop = settings(trainer={"poll_interval": 0.1}), Event()
    ledger.versions.ensure_base(chosen.model.model_path)
    ledger.training = RejectingAll(ledger.transactions, ledger.rewards)
    ledger.training.versions = ledger.versions
    training = Thread(target=TrainingLoop(chosen, ledger, stop).run)
    training.start()
    try:
        for versions in (3, 6):
            eventually(lambda: bool(ledger.alarms.all()))
            [alarm] = ledger.alarms.all()
            assert alarm.name == "versions_rejected"
            assert "3 versions in a row were rejected, the last because it is not below" in alarm.reason
            time.sleep(1)
            assert len(ledger.versions.all()) == 1 + versions
            assert ledger.reports.counts()[State.COMMITTED] == 32 - 4 * versions
            ledger.alarms.clear("versions_rejected")
    finally:
        stop.set()
        training.join(60)
    assert ledger.reports.imbalance() == []


def test_what_is_published_slowly_is_registered_though_the_database_is_impatient(settings, ledger, monkeypatch):
    """No transaction is open meanwhile: a database ends one in which nothing is said for eight seconds."""
    commit(ledger, [sample(i) for i in range(4)])
    put, writing = CheckpointStore.put, []

    def put_slowly(store, staging, version):
        with ledger.transactions.write():  # which would wait for the one that registers
            writing.append(version)
        return put(store, staging, version)

    monkeypatch.setattr(CheckpointStore, "put", put_slowly)
    run(settings(trainer={"total_steps": 1}), Event())
    assert writing == [1]
    assert ledger.versions.newest().version == 1


def test_a_damaged_checkpoint_is_not_gone_on_from(settings, ledger):
    commit(ledger, [sample(i) for i in range(4)])
    run(settings(trainer={"total_steps": 1}), Event())
    weights = ledger.versions.newest().path / "trainer_state" / "critic.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refusal = (
        rf"^checkpoint_root_dir: .*{weights.parent}/critic\.safetensors: its sha256 .*; restore that folder, or give it"
        " up: tuneloop versions reject 1 --reason damaged; then start again$"
    )
    with pytest.raises(EnvironmentRefused, match=refusal):
        run(settings(trainer={"total_steps": 2}), Event())
    ledger.versions.appoint(1, instead_of=0, by="ann", reason="")
    with pytest.raises(EnvironmentRefused, match="tuneloop versions rollback 1 --reason damaged; then"):
        run(settings(trainer={"total_steps": 2}), Event())
    ledger.versions.appoint(0, instead_of=1, by="ann", reason="")
    with pytest.raises(EnvironmentRefused, match="tuneloop versions reject 1 --reason damaged; then"):
        run(settings(trainer={"total_steps": 2}), Event())
    assert ledger.versions.reject(1, "damaged", by="ann", also_retired=True)
    commit(ledger, [sample(i) for i in range(4, 8)])
    run(settings(trainer={"total_steps": 1}), Event())
    assert ledger.versions.newest().version == 2


def test_a_run_of_steps_that_are_not_finite_stops_learning_and_alarms(settings, ledger):
    """Rewards that the ledger takes, and whose advantages float32 does not."""
    chosen = settings(algorithm={"max_skipped_steps": 2, "mini_batches": 1}, trainer={"save_interval": 2})
    commit(ledger, [sample(i) for i in range(4)])
    commit(ledger, [sample(i, reward=1e6, logprobs=_most(i)) for i in range(4, 16)])
    run_until(chosen, lambda: bool(ledger.alarms.all()))
    [alarm] = ledger.alarms.all()
    assert alarm.name == "steps_not_finite"
    assert "2 steps in a row" in alarm.reason
    counts = ledger.reports.counts()
    assert (counts[State.DROPPED], counts[State.COMMITTED]) == (8, 8)
    assert [each.version for each in ledger.versions.all()] == [0]
    assert ledger.reports.imbalance() == []


def _most(number):
    return np.full_like(sample(number).logprobs, 3e38)


class _Spans:
    """Takes spans instead of a receiver."""

    def __init__(self):
        self.sent = []

    def send(self, span):
        self.sent.append(span)


def test_steps_link_to_their_replies_and_versions_to_their_steps(settings, ledger):
    commit(ledger, [sample(i) for i in range(8)])
    chosen, spans = settings(trainer={"total_steps": 2, "save_interval": 2}), _Spans()
    ledger.versions.ensure_base(chosen.model.model_path)
    TrainingLoop(chosen, ledger, Event(), spans=StepSpans(chosen, spans)).run()
    first, second, version = spans.sent
    assert [each.name for each in spans.sent] == ["step", "step", "version"]
    with ledger.transactions.engine.connect() as connection:
        replies = connection.exec_driver_sql("SELECT DISTINCT msg_id FROM experiences").scalars().all()
    linked = {link for each in (first, second) for link in each.links}
    assert linked == {span_of_reply(each) for each in replies}
    assert version.links == [first.id, second.id]
    assert version.id == span_of_version(f"{chosen.project}/{chosen.name}", 1)
    assert first.started_ns <= first.ended_ns <= second.started_ns


def test_what_waits_beyond_the_backlog_expires_with_each_version_and_the_pace_is_noted(settings, ledger):
    commit(ledger, [sample(i) for i in range(24)])
    chosen = settings(trainer={"total_steps": 2}, buffer={"train_batch_size": 4, "max_backlog": 2})
    with capture_logs() as logs:
        run(chosen, Event())
    trained, others = {State.TRAINED: 8}, {State.COMMITTED: 4, State.EXPIRED: 12}
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | trained | others
    assert [(log["set_aside"], log["waiting"]) for log in logs if log["event"] == "trainer_lags"] == [(12, 8)]
    pace = find_pace(chosen.job_dir, steady_clock())
    assert pace is not None
    assert pace.lag == 0  # nothing was committed between the two
    assert 0 < pace.steps + pace.publishing <= 1


def test_nothing_expires_between_versions_so_that_a_restart_makes_the_same_steps(settings, ledger):
    commit(ledger, [sample(i) for i in range(8)])
    chosen = settings(trainer={"save_interval": 3}, buffer={"train_batch_size": 4, "max_backlog": 1})
    run_until(chosen, lambda: chosen.tensorboard_dir.exists() and len(_losses(chosen)) == 2)
    commit(ledger, [sample(i) for i in range(8, 24)])
    run(settings(trainer={"save_interval": 3, "total_steps": 3}, buffer={"max_backlog": 1}), Event())
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {
        State.TRAINED: 12,
        State.COMMITTED: 4,
        State.EXPIRED: 8,
    }


@pytest.mark.contract
@pytest.mark.parametrize("method", ["ppo", "reinforce"])
def test_ten_steps_with_equal_rewards_are_told_as_such(settings, ledger, method):
    commit(ledger, [sample(number, reward=1.0) for number in range(20)])
    chosen = settings(
        algorithm={"algorithm_type": method},
        buffer={"train_batch_size": 2, "max_backlog": None},
        trainer={"total_steps": 10, "save_interval": 10},
    )
    with capture_logs() as said:
        run(chosen, Event())
    [alarm] = ledger.alarms.all()
    assert (alarm.name, alarm.step, alarm.holds) == ("not_learning", 10, False)
    assert alarm.reason.startswith("all rewards of the last 10 steps are 1, so that no reply is better than another:")
    assert [each["reason"] for each in said if each["event"] == "alarm_raised"] == [alarm.reason]
    assert points(chosen.tensorboard_dir / "trainer", "drift/not_learning") == [(10, 1.0)]
