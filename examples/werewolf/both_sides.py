"""Tune both sides of the game against each other: two policies of one service, adapters on one model.

Each side learns from its own calls and its own reward, and has versions of its own.

python -m examples.werewolf.both_sides                                  # a tiny model, made here
python -m examples.werewolf.both_sides --model Qwen/Qwen3-0.6B --gpu --gpu-share 0.4 --rate 1e-5 --batch 32
"""

import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import yaml
from openai import AsyncOpenAI

from examples.sums.services import Services
from examples.werewolf.world import Game, Village, games, judge, judge_villagers
from examples.worlds.experiment import Experiment, options_of, write_tasks
from examples.worlds.schooling import Schooling
from examples.worlds.start import Beginner
from tuneloop.runner import AlgorithmConfig, DatasetConfig, WorkflowOutput, tune

NAME = "werewolf"
SIDES = ("wolves", "villagers")
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
                model=side.model_name, messages=messages, max_tokens=Village.max_tokens
            )
            player, messages = turns.send(completion.choices[0].message.content or "")
    except StopIteration:
        wolves, villagers = judge(game), judge_villagers(game)
    rewards = {"wolves": wolves.reward, "villagers": villagers.reward}
    return WorkflowOutput(reward=rewards, metrics={**wolves.metrics, **villagers.metrics})


@contextmanager
def service(experiment: Experiment, key: str) -> Iterator[str]:
    """The URL of a service that trains adapters; it could as well be one in production."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values, folder = experiment.settings(), experiment.options.dir.absolute()
    values |= {"mode": "both", "name": NAME, "checkpoint_root_dir": str(folder / "service")}
    values["model"] |= {
        "model_path": experiment.model_path(Village(), BEGINNER),
        "max_model_len": 512,
        "lora": {"rank": 16, "resident": len(SIDES)},
    }
    values["explorer"] |= {"proxy_port": port, "admin_key": key}
    file = folder / "tuneloop.yaml"
    file.write_text(yaml.safe_dump(values))
    roles = ("explorer", "trainer")
    with Services(roles, config=file, logs={name: folder / f"{name}.log" for name in roles}):
        yield f"http://127.0.0.1:{port}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the tasks, tune, and print the result."""
    options = options_of(NAME, steps=40, rate=2e-3, arguments=arguments)
    experiment, key = Experiment(NAME, options), secrets.token_urlsafe(16)
    tasks = write_tasks(options.dir / "tasks", train=games(1, 4096), test=games(2, options.held_out))
    with service(experiment, key) as url:
        result = tune(
            workflow_func=play,
            service=dict.fromkeys(SIDES, url),
            policy={side: side for side in SIDES},
            api_key=key,
            train_dataset=DatasetConfig(path=str(tasks), split="train", total_steps=options.steps),
            eval_dataset=DatasetConfig(path=str(tasks), split="test"),
            algorithm=AlgorithmConfig(
                algorithm_type="multi_step_grpo",
                group_size=options.group,
                batch_size=options.batch,
                learning_rate=options.rate,
                eval_interval_steps=options.evaluate_every,
            ),
            experiment_name=f"{NAME}-{options.seed}",
            checkpoint_root_dir=options.dir / "checkpoints",
            seed=options.seed,
        )
    experiment.report(result)


if __name__ == "__main__":
    sys.exit(main())
