"""`python -m examples.tasks TASK`: the loop of the demo with another task, another method, another kind of rater.

python -m examples.tasks tools --method grpo
python -m examples.tasks calculator --method ppo --samples 8192
python -m examples.tasks sums --method reinforce --flip 0.2
python -m examples.tasks tools --tools strict
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from examples.sums.folder import Folder, FolderRefused
from examples.sums.loop import DemoFailed, Loop, url_of
from examples.sums.services import ServiceFailed, Services
from examples.sums.summary import Summary
from examples.sums.view import view_on
from examples.tasks.drive import Agent, HeldTools
from examples.tasks.methods import BATCH, METHODS, Method
from examples.tasks.rating import Rater
from examples.tasks.start import TASKS, start, teacher, teacher_of
from tuneloop.shared.errors import SettingsError
from tuneloop.shared.settings.settings import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 when no request failed."""
    options = _options(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    started = time.monotonic()
    console, folder = Console(), Folder(options.dir.absolute())
    options.reward = "random" if options.coin else "judge"
    try:
        with folder.start_afresh(), view_on(console) as view:
            settings = folder.write_settings(seed=options.seed, changes=changes(options))
            view.phase("warming the model up until it is 30 % right")
            shutil.copytree(start(options.start, options.task, options.seed), folder.model)
            if METHODS[options.method].taught:
                view.phase("warming its teacher up")
                teacher(options.start, options.task, options.seed)
            logs = {name: folder.log(name) for name in ("explorer", "trainer")}
            agent = agent_of(options, settings)
            with Services(("explorer", "trainer"), config=folder.settings, logs=logs) as services:
                loop = Loop(options, settings, services, view)
                summary = asyncio.run(_run(loop, agent, started))
    except (FolderRefused, ServiceFailed, DemoFailed, SettingsError) as error:
        console.print(f"It failed: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130
    line = {**asdict(summary), "method": options.method, "task": options.task, "judged": judge_all(agent)}
    folder.summary.write_text(json.dumps(line) + "\n")
    console.print(summary.page(settings, folder.settings), highlight=False, markup=False, soft_wrap=True)
    return 1 if summary.requests_failed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tasks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--method", choices=METHODS, default="ppo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=4096, help="runs that get feedback")
    parser.add_argument("--steps", type=int, default=10**6, help="training steps after which it ends earlier")
    parser.add_argument("--flip", type=float, default=0.0, help="share of rewards that say the opposite")
    parser.add_argument("--offset", type=float, default=0.0, help="added to each reward")
    parser.add_argument("--coin", action="store_true", help="rewards are tossed: the control, which must not learn")
    parser.add_argument(
        "--tools", choices=get_args(HeldTools), default="plain", help="how the engine holds calls to a grammar"
    )
    parser.add_argument("--gpu", action="store_true", help="vLLM on the first GPU of CUDA_VISIBLE_DEVICES, or of all")
    parser.add_argument(
        "--set", nargs="*", default=[], type=_change, metavar="NAME=VALUE", help="settings of `algorithm`, dotted"
    )
    parser.add_argument("--start", type=Path, default=Path("tasks-start"), help="where start models are kept")
    parser.add_argument("--dir", type=Path, default=Path("tasks-run"), help="where everything else goes")
    return parser.parse_args(arguments)


def _change(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return text


def agent_of(options: argparse.Namespace, settings: Settings) -> Agent:
    """The agent that the options ask for."""
    task, method = TASKS[options.task], METHODS[options.method]
    low, high = task.reward_range
    rater = Rater(low=low, high=high, flip=options.flip, offset=options.offset, coin=options.coin)
    demonstrate = method.feedback == "demonstration"
    agent = Agent(url_of(settings), task, rater, runs=method.runs, most=options.samples, demonstrate=demonstrate)
    agent.held = options.tools
    return agent


async def _run(loop: Loop, agent: Agent, started: float) -> Summary:
    async with agent:
        return await loop.run(started, agent)


def changes(options: argparse.Namespace) -> dict[str, Any]:
    """Changes of the demo's settings."""
    method: Method = METHODS[options.method]
    task = TASKS[options.task]
    taught_by = teacher_of(options.start, task.name, options.seed).absolute()
    settings = method.settings(task.name, options.set, teacher=taught_by)
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"} if task.tools else {}
    # Many such models share a GPU.
    place = {"gpu_memory_utilization": 0.05, "single_process": False} if options.gpu else {}
    return {
        "name": task.name,
        "model": {"served_model_name": task.name, "max_model_len": 512 if task.tools else 128},
        "cluster": {"gpu_per_node": int(options.gpu)},
        "explorer": {"rollout_model": {**tools, **place}},
        "algorithm": settings["algorithm"],
        "buffer": {**settings["buffer"], "group_timeout": 10.0},
        "reward": {"clip": None},
    }


def judge_all(agent: Agent) -> list[list[float]]:
    """[runs so far, mean reward by the judge, share that ended right] for each batch's worth of runs."""
    parts = [agent.judged[i : i + BATCH] for i in range(0, len(agent.judged), BATCH)]
    return [
        [
            number * BATCH + len(part),
            round(sum(each.reward for each in part) / len(part), 4),
            round(sum(each.right for each in part) / len(part), 4),
        ]
        for number, part in enumerate(parts)
    ]


if __name__ == "__main__":
    sys.exit(main())
