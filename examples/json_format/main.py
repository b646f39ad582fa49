"""Tune a model until it answers as JSON: 32 M parameters in Qwen3's shape, made and trained on a CPU in a quarter hour.

python -m examples.json_format.main
python -m examples.json_format.main --model Qwen/Qwen3-0.6B --gpu --gpu-share 0.4 --rate 1e-6
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from examples.json_format.world import PROMPT, Capitals, judge, questions
from examples.worlds.experiment import Experiment, options_of, write_tasks
from examples.worlds.schooling import Schooling
from examples.worlds.start import Beginner
from tuneloop.runner import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune

NAME = "json_format"
#: 32 M parameters, its head tied to its embeddings as in most small models: JSON in three answers of ten.
BEGINNER = Beginner(
    hidden=512,
    layers=10,
    is_tied=True,
    threads=2,
    schooling=Schooling(early_steps=60, late_steps=40, batch=16, goal=0.4, rate=1e-3, late_rate=3e-4, rising_steps=10),
)


async def answer(task: Mapping[str, Any], model: AsyncOpenAI) -> WorkflowOutput:
    """One call."""
    messages: Any = [{"role": "system", "content": PROMPT}, {"role": "user", "content": task["question"]}]
    reply = await model.chat.completions.create(model=NAME, messages=messages)
    return WorkflowOutput(response=reply.choices[0].message.content or "")


def judge_function(task: Mapping[str, Any], response: str) -> JudgeOutput:
    """1 for the format, else 0."""
    verdict = judge(response)
    return JudgeOutput(reward=verdict.reward, metrics=verdict.metrics)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the tasks, tune, and print the result."""
    options = options_of(NAME, steps=20, rate=1e-4, arguments=arguments)
    experiment = Experiment(NAME, options)
    test = questions(held_out=True)[: options.held_out]
    tasks = write_tasks(options.dir / "tasks", train=questions(held_out=False), test=test)
    result = tune(
        workflow_func=answer,
        judge_func=lambda task, response: experiment.record_verdict(judge_function(task, response)),
        model=TunerModelConfig(
            model_path=experiment.model_path(Capitals(), BEGINNER), max_model_len=512, max_tokens=Capitals.max_tokens
        ),
        train_dataset=DatasetConfig(path=str(tasks), split="train", total_steps=options.steps),
        eval_dataset=DatasetConfig(path=str(tasks), split="test"),
        algorithm=AlgorithmConfig(
            algorithm_type="grpo",
            group_size=options.group,
            batch_size=options.batch,
            learning_rate=options.rate,
            eval_interval_steps=options.evaluate_every,
        ),
        settings=experiment.settings(),
        experiment_name=f"{NAME}-{options.seed}",
        checkpoint_root_dir=options.dir / "checkpoints",
        shuffle=True,
        seed=options.seed,
    )
    experiment.report(result)


if __name__ == "__main__":
    sys.exit(main())
