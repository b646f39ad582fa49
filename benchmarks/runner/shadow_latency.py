"""What a TrainingRunner costs the calls that it wraps: how long they take with and without it.

.venv/bin/python -m benchmarks.runner.shadow_latency [--calls 4000] [--rate 0.1] [--every-s 0.01]
                                                     [--waits-ms 5] [--busy-ms 20]

Production answers at once, so that nothing hides what is added. Bare and wrapped calls come in turn, so that what else
the machine does meets both alike. Meanwhile the shadow runs ask a server in a process of its own, and their rewards are
written to disk, sent and committed. `alone` are bare calls before the runner is started: what shadow runs compute
(`--busy-ms`, in Python) keeps all threads of the process waiting, those of bare calls too.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from statistics import quantiles
from typing import Any

import httpx

from tests.doubles.engine import CHAT, engine_place
from tests.runner.feedback.service import feedback_service
from tuneloop.runner import SamplingRateStrategy, ShadowResult, ShadowRun, TrainingRunner

#: A long conversation: copying it is the app thread's largest cost.
REQUEST = {"model": "t", "messages": [{"role": "user", "content": "3+4=" * 50}] * 20, "max_tokens": 12}

_WARMING_UP = 200


def serve(reported: Connection) -> None:
    """An engine double, and a place for feedback."""
    with engine_place() as place, feedback_service() as service:
        reported.send((place.fresh().url, service.url))
        reported.recv()


def production_of(waits_s: float) -> Callable[[dict[str, Any]], Awaitable[str]]:
    """Answers at once, or after a wait, as for an engine."""

    async def production(request: dict[str, Any]) -> str:
        if waits_s:
            await asyncio.sleep(waits_s)
        return "7"

    return production


async def time_call(call: Callable[..., Awaitable[Any]]) -> tuple[float, float]:
    """Milliseconds of wall clock, and of this thread's processor time."""
    started, computed = time.perf_counter(), time.thread_time()
    await call(REQUEST)
    return 1000 * (time.perf_counter() - started), 1000 * (time.thread_time() - computed)


@dataclass(frozen=True, slots=True)
class ShadowAgent:
    """Makes shadow runs that compute for a while, and ask the engine."""

    engine: str
    busy_ms: float

    def __call__(self, run: ShadowRun) -> Callable[[dict[str, Any]], Any]:
        """One of them."""
        return self._answer

    def _answer(self, request: dict[str, Any]) -> Any:
        until = time.thread_time() + self.busy_ms / 1000
        while time.thread_time() < until:
            sum(range(100))
        return client_of(self.engine).post(CHAT, json=request).json()["id"]


@lru_cache
def client_of(engine: str) -> httpx.Client:
    """The one of this process."""
    return httpx.Client(base_url=engine, timeout=60)


def worth(result: ShadowResult) -> float:
    """The reward."""
    return 1.0


async def measure(options: argparse.Namespace, engine: str, feedback: str) -> dict[str, Any]:
    """Both, alternating."""
    production = production_of(options.waits_ms / 1000)
    runner = TrainingRunner(
        service=feedback,
        model="t",
        agent=ShadowAgent(engine, options.busy_ms),
        reward_calculator=worth,
        selection_strategy=SamplingRateStrategy.of(options.rate),
        commit_interval_seconds=1,
    )
    taken: dict[str, list[tuple[float, float]]] = {"alone": [], "bare": [], "wrapped": []}
    for _ in range(options.calls // 2):
        await asyncio.sleep(options.every_s)
        taken["alone"].append(await time_call(production))
    with runner:
        wrapped = runner.wrap(production)
        for number in range(options.calls):
            await asyncio.sleep(options.every_s)
            kind, call = ("wrapped", wrapped) if number % 2 else ("bare", production)
            taken[kind].append(await time_call(call))
    found = {kind: summary(times[_WARMING_UP:]) for kind, times in taken.items()}
    return found | {"counters": {kind: count for kind, count in runner.counters().items() if count}}


def summary(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The middle and the end of them, in milliseconds."""
    found: dict[str, float] = {}
    for name, each in zip(("clock", "processor"), zip(*times, strict=True), strict=True):
        cuts = quantiles(each, n=100)
        found |= {f"{name}_p50_ms": round(cuts[49], 4), f"{name}_p99_ms": round(cuts[98], 4)}
        found[f"{name}_mean_ms"] = round(sum(each) / len(each), 4)
    return found


def main() -> int:
    """Measure, and print; 0 if wrapped calls take less than a millisecond longer at the 50th and 99th percentile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runner.shadow_latency", description=__doc__)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=0.1, help="share of the calls that are run again")
    parser.add_argument("--busy-ms", type=float, default=0.0, help="that a shadow run computes")
    parser.add_argument("--waits-ms", type=float, default=0.0, help="that production waits in a call")
    parser.add_argument("--every-s", type=float, default=0.01, help="seconds between two calls")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    server = spawn.Process(target=serve, args=(there,))
    server.start()
    try:
        found = asyncio.run(measure(options, *here.recv()))
    finally:
        here.send("end")
        server.join()
    print(json.dumps(found, indent=2))
    return int(any(found["wrapped"][f"clock_{at}_ms"] - found["alone"][f"clock_{at}_ms"] >= 1 for at in ("p50", "p99")))


if __name__ == "__main__":
    sys.exit(main())
