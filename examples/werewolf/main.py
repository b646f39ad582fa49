"""Tune two wolves, who share a model, by the games that they win against four villagers who follow a script.

python -m examples.werewolf.main                                        # a tiny model, made here; minutes on a CPU
python -m examples.werewolf.main --model Qwen/Qwen3-0.6B --gpu --gpu-share 0.4 --rate 1e-6 --batch 32
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from examples.werewolf.world import Game, Wolves, games, judge
from examples.worlds.experiment import Experiment, options_of, write_tasks
from examples.worlds.schooling import Schooling
from examples.worlds.start import Beginner
from tuneloop.runner import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from tuneloop.runner import JudgeOutput as GameOutput

NAME = "werewolf"
#: 0.5 M parameters: it often betrays the other wolf, or names anybody: the wolves win half of their games.
BEGINNER = Beginner(hidden=128, layers=2, schooling=Schooling(early_steps=500, late_steps=120, goal=0.52))


async def play(task: Mapping[str, Any], model: AsyncOpenAI) -> WorkflowOutput:
    """One game. Each wolf has a conversation of its own, and both are calls of one run, with one reward."""
    game = Game(task)
    turns = game.play()
    try:
        _, messages = next(turns)
        while True:
            completion = await model.chat.completions.create(
                model=NAME,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=Wolves.max_tokens,
            )
            _, messages = turns.send(completion.choices[0].message.content or "")
    except StopIteration:
        verdict = judge(game)
    return WorkflowOutput(response=GameOutput(reward=verdict.reward, metrics=verdict.metrics))


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the tasks, tune, and print the result."""
    options = options_of(NAME, steps=100, rate=3e-4, arguments=arguments)
    experiment = Experiment(NAME, options)
    tasks = write_tasks(options.dir / "tasks", train=games(1, 4096), test=games(2, options.held_out))
    result = tune(
        workflow_func=play,
        judge_func=lambda task, response: experiment.record_verdict(response),
        model=TunerModelConfig(model_path=experiment.model_path(Wolves(), BEGINNER), max_model_len=512),
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
        seed=options.seed,
    )
    experiment.report(result)


if __name__ == "__main__":
    sys.exit(main())
