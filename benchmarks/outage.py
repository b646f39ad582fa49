"""Replies and feedback at a rate while the database is away for a quarter of the time: what was lost, and how long.

.venv/bin/python -m benchmarks.outage [--minutes 60] [--per-s 200]

A real explorer on PostgreSQL, engines are doubles. Each reply gets feedback. Every acknowledgement is looked for in the
database at the end, once. Exit code 1: one is not there, or there twice.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles

import httpx
from sqlalchemy import select

from tests.doubles import postgres
from tests.explorer.running import HELLO
from tests.loop.harness.services import Service, ledger_of
from tests.loop.test_full_disk import explorer_of
from tuneloop.shared.ledger.storage.schema import experiences, feedback

_DRAINED_S = 600.0


class Traffic:
    """Clients that ask at a fixed rate, and note acknowledgements with their delays."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.replies: dict[str, float] = {}
        self.rewards: dict[str, float] = {}
        self.failures: Counter[str] = Counter()

    async def run(self, per_s: float, seconds: float) -> None:
        """Ask so often a second for so many seconds."""
        began, asked = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while (since := time.monotonic() - began) < seconds:
                for _ in range(int(since * per_s) - asked):
                    group.create_task(self._ask())
                    asked += 1
                await asyncio.sleep(0.01)

    async def _ask(self) -> None:
        began, reward = time.monotonic(), random.random()
        try:
            reply = (await self._http.post("/v1/chat/completions", json=HELLO)).raise_for_status().json()["id"]
            self.replies[reply] = time.monotonic() - began
            body = {"msg_ids": [reply], "reward": reward}
            (await self._http.post("/feedback", json=body)).raise_for_status()
            self.rewards[reply] = reward
        except httpx.HTTPError as error:
            self.failures[type(error).__name__] += 1


async def _measure(explorer: Service, server: postgres.PostgresServer, minutes: float, per_s: float) -> Traffic:
    limits = httpx.Limits(max_connections=500, max_keepalive_connections=500)
    async with httpx.AsyncClient(base_url=explorer.url, timeout=60, limits=limits) as http:
        traffic = Traffic(http)
        running = asyncio.create_task(traffic.run(per_s, minutes * 60))
        await asyncio.sleep(minutes * 15)
        await asyncio.to_thread(server.stop)
        await asyncio.sleep(minutes * 15)
        await asyncio.to_thread(server.start)
        await running
        deadline = time.monotonic() + _DRAINED_S
        while (await http.post("/commit", json={"task_id": "nobody"})).status_code != 200:
            if time.monotonic() > deadline:
                raise TimeoutError("the outbox is not drained")
            await asyncio.sleep(1)
        return traffic


def main() -> int:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outage", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--per-s", type=float, default=200.0, help="replies a second")
    options = parser.parse_args()
    server = postgres.started()
    buffer = {"trainer_input": {"experience_buffer": {"path": server.url}}}
    with tempfile.TemporaryDirectory(prefix="outage-") as folder, explorer_of(Path(folder), buffer=buffer) as explorer:
        traffic = asyncio.run(_measure(explorer, server, options.minutes, options.per_s))
        ledger = ledger_of(explorer.settings)
        with ledger.transactions.engine.connect() as connection:
            stored = Counter(connection.execute(select(experiences.c.msg_id)).scalars())
            said = connection.execute(select(feedback.c.msg_id, feedback.c.value))
            rewards = Counter((row.msg_id, row.value) for row in said)
        ledger.close()
    server.close()
    percentiles = quantiles(traffic.replies.values(), n=100)
    lost = [each for each in traffic.replies if not stored[each]]
    lost += [reply for reply, reward in traffic.rewards.items() if not rewards[reply, reward]]
    twice = [each for each, count in [*stored.items(), *rewards.items()] if count > 1]
    report = {
        "replies": len(traffic.replies),
        "feedback": len(traffic.rewards),
        "failures": traffic.failures,
        "p50_ms": round(1000 * percentiles[49], 1),
        "p99_ms": round(1000 * percentiles[98], 1),
        "lost": len(lost),
        "twice": len(twice),
    }
    print(json.dumps(report, indent=2))
    return int(bool(lost or twice))


if __name__ == "__main__":
    sys.exit(main())
