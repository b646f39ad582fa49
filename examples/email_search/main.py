"""Tune an assistant that searches a mailbox until it calls the right tool with the right argument.

python -m examples.email_search.main                                    # a tiny model, made here; minutes on a CPU
python -m examples.email_search.main --model Qwen/Qwen3-0.6B --gpu --gpu-share 0.4 --rate 1e-6 --batch 32
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from examples.email_search.world import MOST_CALLS, PROMPT, TOOLS, Mailbox, judge, questions, search
from examples.worlds.experiment import Experiment, options_of, write_tasks
from examples.worlds.react import MAX_TOKENS, react
from examples.worlds.schooling import Schooling
from examples.worlds.start import Beginner
from tuneloop.runner import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from tuneloop.runner import Reply as Trajectory
from tuneloop.runner.models.run import Run

NAME = "email_search"
#: 0.5 M parameters: the right tool in 60 % of the cases, the right argument in 45 %.
BEGINNER = Beginner(hidden=128, layers=2, schooling=Schooling(early_steps=1200, late_steps=120, goal=0.46))


async def search_mails(task: Mapping[str, Any], run: Run) -> WorkflowOutput:
    """A ReAct agent; the URL binds its client to the run."""
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": task["question"]}]
    async with AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        said = await react(client, messages, model=NAME, tools=TOOLS, run_tool=search, most_calls=MOST_CALLS)
    return WorkflowOutput(response=said)


def judge_function(task: Mapping[str, Any], response: Sequence[Mapping[str, Any]]) -> JudgeOutput:
    """The right tool 1, its argument 0.5, its success 1, an unknown tool -2."""
    trajectory = Trajectory.of_trajectory(response)
    text = trajectory.text if response[-1]["role"] == "assistant" else ""
    verdict = judge(task, text, trajectory.tool_calls)
    return JudgeOutput(reward=verdict.reward, metrics=verdict.metrics)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the tasks, tune, and print the result."""
    options = options_of(NAME, steps=60, rate=3e-4, arguments=arguments)
    experiment = Experiment(NAME, options)
    test = questions(held_out=True)[: options.held_out]
    tasks = write_tasks(options.dir / "tasks", train=questions(held_out=False), test=test)
    result = tune(
        workflow_func=search_mails,
        judge_func=lambda task, response: experiment.record_verdict(judge_function(task, response)),
        model=TunerModelConfig(
            model_path=experiment.model_path(Mailbox(), BEGINNER), max_model_len=1024, max_tokens=MAX_TOKENS
        ),
        train_dataset=DatasetConfig(path=str(tasks), split="train", total_steps=options.steps),
        eval_dataset=DatasetConfig(path=str(tasks), split="test"),
        algorithm=AlgorithmConfig(
            algorithm_type="multi_step_grpo",
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
