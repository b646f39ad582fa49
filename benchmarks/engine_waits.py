"""How an engine's processes wait for each other on a CPU: what it costs them, and what everything beside them.

.venv/bin/python -m benchmarks.engine_waits [--rounds 3]

An explorer with one real vLLM of the tiny model, by turns with processes that call `sched_yield` while they wait and
with such that sleep. A round asks 320 replies of 16 tokens, 16 at once, and one stream of 3 000 tokens. Meanwhile a
process beside them, this one, wants to wake up every 5 ms: the longest that it did not is what a request, the trainer
or a client may have to wait for the processor.
"""

import argparse
import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import yaml

from tests.loop.harness.services import Service, make_model, write_settings
from tuneloop.explorer.engines.vllm_plugin import SLEEPS

_NAP_S = 0.005


class Sleeper:
    """Naps beside what is measured; `longest_s` is how long one nap took at most."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sleeper":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            before = time.monotonic()
            time.sleep(_NAP_S)
            self.longest_s = max(self.longest_s, time.monotonic() - before)


async def many(http: httpx.AsyncClient, model: str) -> None:
    """320 replies of 16 tokens, 16 at once."""

    async def lane() -> None:
        for _ in range(20):
            (await http.post("/v1/chat/completions", json=_question(model, 16))).raise_for_status()

    await asyncio.gather(*(lane() for _ in range(16)))


async def one(http: httpx.AsyncClient, model: str) -> None:
    """A stream of 3 000 tokens."""
    async with http.stream("POST", "/v1/chat/completions", json=_question(model, 3000) | {"stream": True}) as reply:
        async for _ in reply.raise_for_status().aiter_raw():
            pass


def _question(model: str, tokens: int) -> dict[str, object]:
    said = [{"role": "user", "content": "hi"}]
    return {"model": model, "messages": said, "max_tokens": tokens, "ignore_eos": True}


async def time_calls(
    service: Service, what: Callable[[httpx.AsyncClient, str], Awaitable[None]]
) -> tuple[float, float]:
    """The seconds that it took, and the longest nap meanwhile."""
    async with httpx.AsyncClient(base_url=service.url, timeout=300) as http:
        with Sleeper() as sleeper:
            begun = time.monotonic()
            await what(http, service.settings.served_model_name)
            return time.monotonic() - begun, sleeper.longest_s


def measure(folder: Path, rounds: int) -> None:
    """Print a line a round."""
    config = write_settings(folder, make_model(folder / "model"))
    values = yaml.safe_load(config.read_text())
    values["model"]["max_model_len"] = 4096
    config.write_text(yaml.safe_dump(values))
    service = Service(config, "explorer")
    try:
        service.wait_until_ready()
        for _ in range(rounds):
            said = [(name, *asyncio.run(time_calls(service, what))) for name, what in (("many", many), ("one", one))]
            print("   ".join(f"{name}: {took:6.2f} s, stood still {still:5.2f} s" for name, took, still in said))
    finally:
        service.stop()


def main() -> None:
    """Both ways, by turns."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_waits", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for name, sleeps in 2 * (("yields", "0"), ("sleeps", "1")):
        print(name, flush=True)
        os.environ[SLEEPS] = sleeps
        with tempfile.TemporaryDirectory(prefix="waits-") as folder:
            measure(Path(folder), options.rounds)


if __name__ == "__main__":
    main()
