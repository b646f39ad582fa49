"""How long a short request waits while large bodies are parsed: `python -m benchmarks.access.large_bodies`.

Eight bodies of 200,000 names come at once, in one process. Beside them something goes ten times through the event loop,
as a request does. The longest that takes is told for bodies that are parsed as they come, and for bodies that are
parsed by turns, as the explorer does; both in each round.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial

from tuneloop.explorer.bulk_work import BulkWork, take_short_turns
from tuneloop.explorer.http.bodies import parse_object

_NAMES, _BODIES, _PASSES = 200_000, 8, 10


async def _longest_beside(parse: Callable[[], Awaitable[object]]) -> float:
    """Milliseconds of the slowest ten passes while all bodies are parsed."""
    found: list[float] = []
    over = asyncio.Event()

    async def pass_again_and_again() -> None:
        while not over.is_set():
            began = time.perf_counter()
            for _ in range(_PASSES):
                await asyncio.sleep(0.001)
            found.append(1e3 * (time.perf_counter() - began))

    passing = asyncio.create_task(pass_again_and_again())
    await asyncio.sleep(0.1)
    await asyncio.gather(*[parse() for _ in range(_BODIES)])
    over.set()
    await passing
    return max(found)


async def _measure(rounds: int) -> None:
    names = {f"name_{number:07d}_{7919 * number % 1_000_003}": 1 for number in range(_NAMES)}
    data, work = json.dumps({"names": names}).encode(), BulkWork(rests=True)

    async def at_once() -> None:
        parse_object(data)

    async def by_turns() -> None:
        await work.run("key", partial(parse_object, data))

    for _ in range(rounds):
        before, now = await _longest_beside(at_once), await _longest_beside(by_turns)
        print(f"as they come {before:6.0f} ms, by turns {now:6.0f} ms: {before / now:.1f} x", flush=True)
    work.close()


def main() -> None:
    """Print a line for each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    take_short_turns()
    asyncio.run(_measure(given.rounds))


if __name__ == "__main__":
    main()
