"""The CPU that a run of tune() takes beyond a bare call of an openai client, against a server that answers at once.

    python -m benchmarks.runner.runner_overhead [--runs 2000]

Both sides make the same calls, 16 at a time, in this process; the server is another one. The bare calls are those of a
stock AsyncOpenAI. It prints the CPU of this process (user and system) for each run, of the bare calls and of tune(),
and their difference. A run of tune() is: a client bound to its run, the workflow, its result in the journal (on disk),
its reward sent, its share of a step's commit.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import httpx
from openai import AsyncOpenAI

from tests.runner.tuning.service_double import MODEL
from tuneloop.runner import AlgorithmConfig, WorkflowOutput, tune
from tuneloop.runner.tuning.services import free_port

AT_ONCE, GROUP, BATCH = 16, 8, 32
MESSAGES: Any = [{"role": "user", "content": "1+1"}]


async def bare(url: str, runs: int) -> None:
    """Call as often as tune() does, with one client as `openai` has it."""
    room = asyncio.Semaphore(AT_ONCE)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

        async def call() -> None:
            async with room:
                await client.chat.completions.create(model=MODEL, messages=MESSAGES)

        await asyncio.gather(*(call() for _ in range(runs)))


async def workflow(task: Any, model: AsyncOpenAI) -> WorkflowOutput:
    """One call, and nothing else."""
    await model.chat.completions.create(model=MODEL, messages=MESSAGES)
    return WorkflowOutput(reward=task["n"] % 2)


def tune_once(url: str, runs: int) -> None:
    """As many runs of tune()."""
    with tempfile.TemporaryDirectory() as folder:
        tune(
            workflow_func=workflow,
            train_dataset=[{"n": n} for n in range(runs // GROUP)],
            algorithm=AlgorithmConfig(group_size=GROUP, batch_size=BATCH),
            service=url,
            checkpoint_root_dir=folder,
            concurrency=AT_ONCE,
        )


def cpu_ms(work: Callable[[], None], runs: int) -> float:
    """The milliseconds of CPU of this process for each run."""
    before = time.process_time()
    work()
    return 1e3 * (time.process_time() - before) / runs


def main() -> None:
    """Measure both, twice, and print the second time: the first one imports and connects."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=2000)
    runs = parser.parse_args().runs
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "tests.runner.tuning.service_double", str(port), "--prompt"])
    try:
        while True:
            try:
                httpx.get(f"{url}/health/ready")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        for number in (min(runs, 256), runs):
            alone = cpu_ms(lambda number=number: asyncio.run(bare(url, number)), number)  # type: ignore[misc]
            whole = cpu_ms(lambda number=number: tune_once(url, number), number)  # type: ignore[misc]
        print(f"CPU of a run: bare call {alone:.2f} ms, tune() {whole:.2f} ms, overhead {whole - alone:.2f} ms")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
