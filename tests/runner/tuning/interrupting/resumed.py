"""A script that tunes, to be killed and started again, given a URL and a folder."""

import random
import signal
import sys
from typing import Any

from tests.runner.tuning.service_double import MODEL
from tuneloop.runner import AlgorithmConfig, WorkflowOutput, tune

TASKS = [{"question": f"{n}+1"} for n in range(12)]


async def guess(task: dict[str, str], model: Any) -> WorkflowOutput:
    """A run of two calls, whose reward is never the same."""
    for _ in range(2):
        await model.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["question"]}])
    return WorkflowOutput(reward=random.random(), metrics={"luck": random.random()})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    tune(
        workflow_func=guess,
        train_dataset=TASKS,
        eval_dataset=TASKS[:3],
        algorithm=AlgorithmConfig(group_size=3, batch_size=4, eval_interval_steps=2),
        service=sys.argv[1],
        checkpoint_root_dir=sys.argv[2],
        experiment_name="killed",
        concurrency=4,
        resume=True,
    )
