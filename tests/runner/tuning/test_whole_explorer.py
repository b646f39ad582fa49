"""tune() against a real explorer: what it does is in the ledger, under the right names."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.explorer.checkpoints import publish
from tests.explorer.running import RunningExplorer
from tuneloop.runner import AlgorithmConfig, WorkflowOutput, tune
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules

TASKS = [{"question": f"{n}+4=", "worth": n / 8} for n in range(4)]


async def ask_twice(task: Any, model: Any) -> WorkflowOutput:
    for _ in range(2):
        await model.chat.completions.create(
            model=model.model_name, messages=[{"role": "user", "content": task["question"]}], max_tokens=12
        )
    return WorkflowOutput(reward=task["worth"], metrics={"calls": 2})


@contextmanager
def training(explorer: RunningExplorer) -> Iterator[None]:
    """A trainer that makes a version of whatever is committed."""
    stop, ledger, store = threading.Event(), explorer.ledger, CheckpointStore(explorer.settings.job_dir)
    epoch = ledger.training.take_epoch("trainer")

    def work() -> None:
        while not stop.wait(0.05):
            ledger.training.extend(epoch)
            if leased := ledger.training.lease(epoch, 1000, BatchRules(batch_timeout=0.05)):
                ids = [each.id for each in leased]
                ledger.training.register(epoch, ids, step=1, publish=lambda version: publish(store, version))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        ledger.training.end(epoch)


def test_every_call_is_in_the_ledger_with_its_run_and_reward(explorer: RunningExplorer, tmp_path: Path) -> None:
    with training(explorer):
        result = tune(
            workflow_func=ask_twice,
            train_dataset=TASKS,
            eval_dataset=TASKS[:1],
            algorithm=AlgorithmConfig(algorithm_type="ppo", group_size=2, batch_size=2),
            service=explorer.url,
            checkpoint_root_dir=tmp_path,
        )
    rows = explorer.rows("SELECT task_id, run_id, reward, state, version_min FROM experiences ORDER BY task_id, run_id")
    trained = [row for row in rows if row.state == State.TRAINED]
    name = result.folder.name
    assert [(row.task_id, row.run_id, row.reward) for row in trained] == [
        (f"{name}:{task}", str(run), task / 8) for task in range(4) for run in range(2) for _ in range(2)
    ]
    assert [row.version_min for row in trained] == [0] * 8 + [1] * 8, "on-policy"
    assert {row.state for row in rows} == {State.TRAINED, State.DROPPED}
    assert sum(row.state == State.DROPPED for row in rows) == 4, "two evaluations of two calls"
    events = explorer.rows("SELECT metric, source, count(*) FROM feedback GROUP BY metric, source ORDER BY metric")
    assert [tuple(event) for event in events] == [("metrics/calls", None, 8), ("reward", None, 8)]
    assert explorer.ledger.reports.imbalance() == []
    assert (result.steps, result.version) == (2, 2)
