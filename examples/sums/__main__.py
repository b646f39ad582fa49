"""`python -m examples.sums`: vLLM serves a tiny model, an agent gives feedback, and the served model improves."""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.sums.drive import Agent, reward_by
from examples.sums.folder import MODEL_NAME, Folder, FolderRefused, way_to_page
from examples.sums.loop import DemoFailed, Loop, url_of
from examples.sums.services import ServiceFailed, Services
from examples.sums.summary import Summary
from examples.sums.view import View, view_on
from tuneloop.shared.settings.settings import Settings

STEPS = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if the model learnt the task and no request failed."""
    options = _options(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    started = time.monotonic()
    console = Console()
    folder = Folder(options.dir.absolute())
    try:
        with folder.start_afresh(), view_on(console) as view:
            settings = folder.write_settings(seed=options.seed)
            folder.make_keys(settings)
            _say(console, f"The page: {way_to_page(url_of(settings), folder.settings)}, once vLLM serves")
            _prepare(folder, options.seed, view)
            logs = {name: folder.log(name) for name in ("explorer", "trainer")}
            with Services(("explorer", "trainer"), config=folder.settings, logs=logs) as services:
                agent = _agent(options, settings, folder.key.read_text())
                summary = asyncio.run(_run(Loop(options, settings, services, view), agent, started))
    except (FolderRefused, ServiceFailed, DemoFailed) as error:
        console.print(f"The demo failed: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130
    folder.summary.write_text(summary.to_json())
    _say(console, summary.page(settings, folder.settings))
    return 0 if summary.as_hoped else 1


def _agent(options: argparse.Namespace, settings: Settings, key: str) -> Agent:
    reward = reward_by(options.reward, options.seed)
    return Agent(url_of(settings), model=MODEL_NAME, reward=reward, key=key)


async def _run(loop: Loop, agent: Agent, started: float) -> Summary:
    async with agent:
        return await loop.run(started, agent)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.sums", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reward", choices=("judge", "random"), default="judge", help="who gives the feedback")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    parser.add_argument("--dir", type=Path, default=Path("demo"), help="where everything goes")
    return parser.parse_args(arguments)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _prepare(folder: Folder, seed: int, view: View) -> None:
    view.phase("building a model of 0.36 M parameters")
    # imported here: importing torch takes seconds without output
    from examples.sums.model import build, save
    from examples.sums.warmup import warm_up

    model, words = build(seed)
    text = "warming it up until it is 30 % right"
    share = warm_up(model, words, seed, lambda done, most: view.phase(text, f"step {done} of at most {most}"))
    view.phase(f"saving it, {share:.0%} right")
    save(model, words, folder.model)


if __name__ == "__main__":
    sys.exit(main())
