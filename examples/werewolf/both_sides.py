"""Tune both sides of the game: two models, each in a service of its own, trained on its own calls and its own reward.

python -m examples.werewolf.both_sides                                  # two tiny models, made here
python -m examples.werewolf.both_sides --model Qwen/Qwen3-0.6B --gpu --gpu-share 0.2 --rate 1e-6 --batch 32
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from examples.werewolf.world import Game, Village, games, judge, judge_villagers
from examples.worlds.experiment import Experiment, options_of, write_tasks
from examples.worlds.schooling import Schooling
from examples.worlds.start import Beginner
from tuneloop.runner import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune

NAME = "werewolf"
BEGINNER = Beginner(hidden=128, layers=2, schooling=Schooling(early_steps=600, late_steps=120, goal=0.5))


async def play(task: Mapping[str, Any], auxiliary_models: Mapping[str, Any], model: AsyncOpenAI) -> WorkflowOutput:
    """One game. Whoever is asked has a conversation of its own with the model of its side."""
    game = Game(task, scripted=False)
    turns = game.play()
    try:
        player, messages = next(turns)
        while True:
            side = auxiliary_models["wolves" if player in game.wolves else "villagers"]
            completion = await side.chat.completions.create(
                model=NAME, messages=messages, max_tokens=Village.max_tokens
            )
            player, messages = turns.send(completion.choices[0].message.content or "")
    except StopIteration:
        wolves, villagers = judge(game), judge_villagers(game)
    rewards = {"wolves": wolves.reward, "villagers": villagers.reward}
    return WorkflowOutput(reward=rewards, metrics={**wolves.metrics, **villagers.metrics})


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the tasks, tune, and say what came of it."""
    options = options_of(NAME, steps=40, rate=3e-4, arguments=arguments)
    experiment = Experiment(NAME, options)
    tasks = write_tasks(options.dir / "tasks", train=games(1, 4096), test=games(2, options.held_out))
    start = TunerModelConfig(model_path=experiment.model_path(Village(), BEGINNER), max_model_len=512)
    result = tune(
        workflow_func=play,
        models={"wolves": start, "villagers": start},
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
