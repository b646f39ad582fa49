"""Runs of which only the last call was rewarded, from the ledger to a version."""

from threading import Event

import numpy as np
import pytest

from tests.databases import put_file
from tests.trainer.factories import commit, sample
from tuneloop.shared.checkpoints import read_manifest
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.trainer.loop import run


def a_run(name, first, rewards):
    """Calls that go on from each other, with these rewards."""
    calls, history = [], [65, 66, first]
    for number, reward in enumerate(rewards, first):
        reply = np.array([70 + number, 90, 257], np.int32)
        said = {"prompt_ids": np.array(history, np.int32), "completion_ids": reply, "logprobs": np.float32([-5.7] * 3)}
        calls.append(sample(number, task_id="t", run_id=name, temperature=1.0, reward=reward, **said))
        history += [*reply.tolist(), 67]
    return calls


def trained(chosen, runs, *, unsaid=()):
    """The ledger, and the actor's files of the version that was made of the runs."""
    put_file(chosen.database_url, "migrated")
    ledger = Ledger(database.connect(chosen.database_url))
    commit(ledger, runs, unsaid=unsaid)
    run(chosen, Event())
    newest = ledger.versions.all()[-1]
    manifest = read_manifest(newest.path, sha256=newest.manifest_sha256)
    return ledger, [each for each in manifest.files if each.path.startswith("actor/")]


@pytest.mark.parametrize(
    ("algorithm", "each"),
    [
        ({"credit": "discounted", "turn_discount": 0.5}, {"1": [0.25, 0.5, 1.0], "2": [-0.5, -1.0]}),
        ({"credit": "trajectory"}, {"1": [1.0, 1.0, 1.0], "2": [-1.0, -1.0]}),
        ({"algorithm_type": "multi_step_grpo"}, {"1": [1.0, 1.0, 1.0], "2": [-1.0, -1.0]}),
    ],
    ids=["discounted", "trajectory", "multi_step_grpo"],
)
def test_feedback_on_the_last_call_trains_as_feedback_on_each_would(settings, tmp_path, algorithm, each):
    batch = {"group_by": "task", "group_size": 2, "train_batch_size": 2}
    method = {"algorithm_type": "reinforce", "kl_coef": 0.0} | algorithm
    chosen = settings(algorithm=method, buffer=batch, trainer={"total_steps": 1})
    runs = [*a_run("1", 1, each["1"]), *a_run("2", 11, each["2"])]
    ledger, found = trained(chosen, runs, unsaid={1, 2, 11})
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 5}
    assert ledger.reports.audit() == []

    # By each call where that is the same; what a trajectory earned as a whole is paid once.
    credit = "call" if method.get("credit") == "discounted" else chosen.algorithm.credit
    by_each = chosen.model_copy(
        update={
            "checkpoint_root_dir": tmp_path / "other",
            "algorithm": chosen.algorithm.model_copy(update={"credit": credit}),
        }
    )
    _, expected = trained(by_each, runs)
    assert found == expected
