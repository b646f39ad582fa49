"""Do rollouts keep an engine busy? Tokens a second of tune()'s runs beside a plain load generator, on the same engine.

    python -m benchmarks.runner.rollout_load [--runs 192] [--tokens 64] [--at-once 16] [--rounds 3]
    python -m benchmarks.runner.rollout_load --gpu --size 0.6b --tokens 256 --at-once 32 64 --budget-seconds 230

Every run is one call whose reply has --tokens tokens, whatever the model would say (`ignore_eos`), of an engine with
random weights. In each round three ways take turns with as many calls at once: the load generator asks the engine
itself, it asks the explorer before it, and tune() evaluates as many tasks through that explorer.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from benchmarks.on_gpu.random_model import make_model
from benchmarks.on_gpu.services import Clock, await_ready, bare_engine, rollout_of, service, write_settings
from tuneloop.runner import AlgorithmConfig, WorkflowOutput, tune

MODEL, ENGINE_PORT, EXPLORER_PORT = "random", 21_610, 21_611
PROMPT: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Measured(BaseException):
    """The evaluation is over; ends the call."""


class Stopwatch:
    """A view that keeps the evaluation's duration, and ends the call then."""

    seconds = 0.0

    def say(self, sentence: str) -> None: ...

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


def generate(url: str, at_once: int, options: argparse.Namespace) -> float:
    """Seconds of the load generator."""

    async def run() -> float:
        places = asyncio.Semaphore(at_once)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

            async def call() -> None:
                async with places:
                    await _reply(client, options.tokens)

            began = time.monotonic()
            await asyncio.gather(*(call() for _ in range(options.runs)))
            return time.monotonic() - began

    return asyncio.run(run())


def tune_once(url: str, at_once: int, options: argparse.Namespace) -> float:
    """Seconds of an evaluation of as many tasks."""

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
            concurrency=at_once,
            view=watch,
        )
    return watch.seconds


def main() -> None:
    """Start an engine and an explorer, measure, and print the medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gpu", action="store_true", help="the engine on the first GPU")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU's that the engine takes")
    parser.add_argument("--size", default="tiny", help="of the random Qwen3: tiny, 0.6b, 4b, ...")
    parser.add_argument("--runs", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-seconds", type=float, default=3600.0, help="after which no round is begun")
    options = parser.parse_args()
    clock = Clock(options.budget_seconds)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(options.size, folder / "model", on_gpu=options.gpu)
        rollout = rollout_of(on_gpu=options.gpu, memory=options.memory, api_servers=None)
        settings = write_settings(folder / "engine.yaml", _values(folder / "engine", model, rollout, options.gpu))
        engine = stack.enter_context(bare_engine(settings, model, ENGINE_PORT, folder / "engine.log"))
        await_ready(f"{_at(ENGINE_PORT)}/health", engine, folder / "engine.log", timeout_s=clock.remaining)
        attached = {"engine_urls": [_at(ENGINE_PORT)], "dtype": rollout["dtype"]}
        write_settings(folder / "explorer.yaml", _values(folder / "explorer", model, attached, options.gpu))
        explorer = stack.enter_context(service(folder / "explorer.yaml", "explorer", folder / "explorer.log"))
        await_ready(f"{_at(EXPLORER_PORT)}/health/ready", explorer, folder / "explorer.log", timeout_s=120)
        clock.say(f"engine and explorer are up; {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
        for at_once in options.at_once:
            _measure(at_once, options, clock)


def _at(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _values(folder: Path, model: Path, rollout_model: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
    folder.mkdir()
    return {
        "mode": "serve",
        "project": "bench",
        "name": "rollouts",
        "checkpoint_root_dir": str(folder),
        "model": {"model_path": str(model), "max_model_len": 4096, "served_model_name": MODEL},
        "cluster": {"gpu_per_node": int(on_gpu)},
        "explorer": {"proxy_port": EXPLORER_PORT, "rollout_model": rollout_model},
    }


def _measure(at_once: int, options: argparse.Namespace, clock: Clock) -> None:
    ways: dict[str, Callable[[], float]] = {
        "load generator at the engine": lambda: generate(_at(ENGINE_PORT), at_once, options),
        "load generator at the explorer": lambda: generate(_at(EXPLORER_PORT), at_once, options),
        "tune()": lambda: tune_once(_at(EXPLORER_PORT), at_once, options),
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    took = 0.0
    for number in range(options.rounds + 1):
        if clock.remaining < took:
            break
        before = clock.remaining
        for way, measure in ways.items():
            computed, began = time.process_time(), time.monotonic()
            speed = options.runs * options.tokens / measure()
            busy = (time.process_time() - computed) / (time.monotonic() - began)
            if number:  # the first round warms up
                speeds[way].append(speed)
                clock.say(
                    f"{at_once} at once, round {number}: {way}: {speed:.0f} tokens/s, client {busy:.0%} of a core"
                )
        took = before - clock.remaining
    first = speeds["load generator at the engine"]
    for way, found in speeds.items():
        if found:
            ratio = statistics.median(each / engine for each, engine in zip(found, first, strict=True))
            print(f"{at_once} at once: {way}: {statistics.median(found):.0f} tokens/s, {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
