"""A process that spools records for ever, to be killed: `python -m tests.explorer.capture.spooling ROOT`.

Each line of its standard output is the number of a record that `append` has acknowledged.
"""

import asyncio
import itertools
import os
import sys
from pathlib import Path

from tuneloop.explorer.capture.spool import Spool


async def _write(spool: Spool, numbers: "itertools.count[int]") -> None:
    while True:
        number = next(numbers)
        await spool.append([b"%d" % number + b"." * (number % 700)])
        os.write(1, b"%d\n" % number)


async def main() -> None:
    spool, numbers = Spool.open(Path(sys.argv[1])), itertools.count()
    os.write(1, b"ready\n")
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(_write(spool, numbers))


if __name__ == "__main__":
    asyncio.run(main())
