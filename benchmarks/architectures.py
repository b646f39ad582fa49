"""Which architectures take up versions in place, in fresh engines, and as adapters: tiny ones, on real vLLM.

    .venv/bin/python -m benchmarks.architectures [--gpu] [--at-once 6] [--only Llama,Mixtral] [--no-adapters]

Prints a row of the table in docs/architectures.md for each, as soon as it is known. On one GPU all of them, six at a
time, take a few minutes; on two cores each takes about two.
"""

import argparse
import asyncio
import logging
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.loop.harness.architectures import ARCHITECTURES, examine


async def run(names: list[str], folder: Path, options: argparse.Namespace) -> None:
    """Examine architectures, some at once."""
    places = asyncio.Semaphore(options.at_once)

    async def one(name: str) -> None:
        async with places:
            began = time.monotonic()
            where = folder / name.replace(" ", "-")
            examining = partial(examine, name, where, gpu=options.gpu, adapters=not options.no_adapters)
            found = await asyncio.to_thread(examining)
            print(found.row(), flush=True)
            print(f"  {name}: {time.monotonic() - began:.0f} s {found.reason}", flush=True)

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(one(name))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="engines on the one GPU, in bfloat16")
    parser.add_argument("--at-once", type=int, default=1, help="how many engines run at once")
    parser.add_argument("--only", help="names of the table, with commas")
    parser.add_argument("--no-adapters", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    names = options.only.split(",") if options.only else list(ARCHITECTURES)
    print("| architecture | in place | fresh engine | adapters | chosen |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="architectures-") as folder:
        asyncio.run(run(names, Path(folder), options))


if __name__ == "__main__":
    main()
