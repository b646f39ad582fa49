"""A script that tunes with a service that it starts; it is run again after that was killed. Given model and folder."""

import random
import sys
from typing import Any

from openai import AsyncOpenAI

from tuneloop.runner import AlgorithmConfig, TunerModelConfig, WorkflowOutput, tune

TASKS = [{"question": f"{n}+1="} for n in range(12)]
SETTINGS = {
    "cluster": {"gpu_per_node": 0},
    "algorithm": {"kl_coef": 0.0},
    "explorer": {
        "rollout_model": {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "single_process": True,
        }
    },
    "trainer": {"device": "cpu"},
}


async def guess(task: dict[str, str], model: AsyncOpenAI) -> WorkflowOutput:
    """A run of one call, whose reward is never the same."""
    messages: Any = [{"role": "user", "content": task["question"]}]
    await model.chat.completions.create(model=model.model_name, messages=messages, max_tokens=8)  # type: ignore[attr-defined]
    return WorkflowOutput(reward=random.random())


if __name__ == "__main__":
    tune(
        workflow_func=guess,
        train_dataset=TASKS,
        model=TunerModelConfig(sys.argv[1], max_model_len=256),
        algorithm=AlgorithmConfig(group_size=2, batch_size=3),
        settings=SETTINGS,
        checkpoint_root_dir=sys.argv[2],
        experiment_name="left",
        concurrency=2,
        resume=True,
    )
