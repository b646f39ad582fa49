"""Do rollouts keep an engine busy? Tokens a second of tune()'s runs beside a plain load generator, on the same engine.

    python -m benchmarks.runner.rollout_load [--hidden 512 --layers 10] [--runs 192] [--at-once 16] [--rounds 3]

Every run is one call whose reply has --tokens tokens, whatever the model would say (`ignore_eos`), of an engine with
random weights. In each round three ways take turns with as many calls at once: the load generator asks the engine
itself, it asks the explorer before it, and tune() evaluates as many tasks through that explorer.
"""

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from openai import AsyncOpenAI

from examples.json_format.world import Capitals
from examples.sums.model import save
from examples.worlds import model as models
from tests.loop.harness.bare_engine import KEY, MODEL, attached_to, engine_on, url_of
from tests.loop.harness.services import Service, free_port, write_settings
from tuneloop.runner import AlgorithmConfig, WorkflowOutput, tune

PROMPT: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Measured(BaseException):
    """The evaluation is over, and no more is wanted of the call."""


class Stopwatch:
    """A view that keeps how long the evaluation took, and ends the call then."""

    seconds = 0.0

    def say(self, sentence: str) -> None:
        """Nothing."""

    run_ended = step = say

    def evaluation(self, report: Any, *, seconds: float) -> None:
        """Keep the seconds. Raises Measured."""
        if report.failed:
            raise SystemExit(f"{report.failed} runs failed")
        self.seconds = seconds
        raise Measured


async def _reply(client: AsyncOpenAI, tokens: int) -> None:
    body = {"ignore_eos": True}
    reply = await client.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=tokens, extra_body=body)
    if reply.usage is None or reply.usage.completion_tokens != tokens:
        raise SystemExit(f"the reply has not {tokens} tokens: {reply.usage}")


def generate(url: str, key: str, options: argparse.Namespace) -> float:
    """Seconds that the load generator takes."""

    async def run() -> float:
        places = asyncio.Semaphore(options.at_once)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:

            async def call() -> None:
                async with places:
                    await _reply(client, options.tokens)

            began = time.monotonic()
            await asyncio.gather(*(call() for _ in range(options.runs)))
            return time.monotonic() - began

    return asyncio.run(run())


def tune_once(url: str, options: argparse.Namespace) -> float:
    """Seconds that an evaluation of as many tasks takes."""

    async def workflow(task: Any, model: AsyncOpenAI) -> WorkflowOutput:
        await _reply(model, options.tokens)
        return WorkflowOutput(reward=1.0)

    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Measured):
        tune(
            workflow_func=workflow,
            train_dataset=[{"n": 0}],
            eval_dataset=[{"n": number} for number in range(options.runs)],
            algorithm=AlgorithmConfig(algorithm_type="ppo", group_size=2, batch_size=1),
            service=url,
            checkpoint_root_dir=folder,
            concurrency=options.at_once,
            view=watch,
        )
    return watch.seconds


def main() -> None:
    """Start an engine and an explorer, measure, and print the medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--runs", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = models.tokenizer(Capitals())
        torch.set_num_threads(1)
        save(models.build(words, hidden=options.hidden, layers=options.layers), words, folder / "model")
        (folder / "engine").mkdir()
        with engine_on(free_port(), folder / "engine", folder / "model") as engine:
            service = Service(_settings(folder, attached_to(engine)), "explorer")
            try:
                service.wait_until_ready()
                _measure(url_of(engine), service.url, options)
            finally:
                service.stop()


def _settings(folder: Path, rollout_model: dict[str, Any]) -> Path:
    path = write_settings(folder, folder / "model", mode="serve")
    values = yaml.safe_load(path.read_text())
    values["model"]["served_model_name"] = MODEL
    values["explorer"]["rollout_model"] = rollout_model
    path.write_text(yaml.safe_dump(values))
    return path


def _measure(engine: str, explorer: str, options: argparse.Namespace) -> None:
    ways: dict[str, Callable[[], float]] = {
        "load generator at the engine": lambda: generate(engine, KEY, options),
        "load generator at the explorer": lambda: generate(explorer, "none", options),
        "tune()": lambda: tune_once(explorer, options),
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds + 1):
        for way, measure in ways.items():
            speed = options.runs * options.tokens / measure()
            if number:  # the first round warms up
                speeds[way].append(speed)
                print(f"round {number}: {way}: {speed:.0f} tokens/s", flush=True)
    first = statistics.median(speeds["load generator at the engine"])
    for way, found in speeds.items():
        print(f"{way}: {statistics.median(found):.0f} tokens/s, {statistics.median(found) / first:.2f}")


if __name__ == "__main__":
    main()
