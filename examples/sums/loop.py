"""The run against the services, from the first health check to the last measurement."""

import argparse
import asyncio
import statistics
import time
from typing import Protocol

import httpx

from examples.sums.drive import Requests
from examples.sums.services import Services
from examples.sums.summary import Summary
from examples.sums.view import Point, Progress, View
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.settings.settings import Settings

QUESTIONS_BEFORE, QUESTIONS_AFTER = 256, 512
#: Batches that may wait for the trainer.
AHEAD = 2
_START_S, _STALL_S, _MOST_FAILURES = 300.0, 120.0, 50


class DemoFailed(Exception):
    """The demo cannot continue; the message has the cause."""


class Driver(Protocol):
    """An agent that asks, judges and gives feedback."""

    requests: Requests

    async def measure(self, questions: int, *, seed: int) -> float:
        """The share of right answers, without giving any feedback."""
        ...

    async def drive(self, ledger: Ledger, *, seed: int, until_step: int, ahead: int) -> None:
        """Ask and give feedback until the trainer has made `until_step` steps; `ahead` replies may wait for it."""
        ...


class Loop:
    """One run."""

    def __init__(self, options: argparse.Namespace, settings: Settings, services: Services, view: View) -> None:
        self._options, self._settings, self._services, self._view = options, settings, services, view
        self._url = url_of(settings)

    async def run(self, started: float, agent: Driver) -> Summary:
        """Measure, drive, measure again."""
        self._view.phase(f"starting vLLM (35 to 70 s), the explorer at {self._url}, and the trainer")
        await self._until_ready()
        ledger = Ledger(connect(self._settings.database_url))
        try:
            rounds = asyncio.ensure_future(self._rounds(agent, ledger, started))
            watching = asyncio.ensure_future(self._watch(agent, ledger))
            try:
                await asyncio.wait({rounds, watching}, return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    watching.result()
                return rounds.result()
            finally:
                rounds.cancel()
                watching.cancel()
                await asyncio.gather(rounds, watching, return_exceptions=True)
        finally:
            ledger.close()

    async def _rounds(self, agent: Driver, ledger: Ledger, started: float) -> Summary:
        seed = self._options.seed
        self._view.phase("measuring the reward before")
        before = await agent.measure(QUESTIONS_BEFORE, seed=seed + 1000)
        self._view.phase(
            f"the agent asks and gives feedback, while the model is trained and served (before: {before:.2f})"
        )
        ahead = AHEAD * self._settings.buffer.train_batch_size
        await agent.drive(ledger, seed=seed, until_step=self._options.steps, ahead=ahead)
        self._view.phase("waiting until the last version is served")
        await self._until_settled(ledger)
        self._view.phase("measuring the reward after")
        after = await agent.measure(QUESTIONS_AFTER, seed=seed + 2000)
        progress = self._progress(agent, ledger)
        return Summary(
            seed=seed,
            reward=self._options.reward,
            reward_before=round(before, 4),
            reward_after=round(after, 4),
            versions=progress.version,
            steps=progress.step,
            trained=progress.counts[State.TRAINED],
            requests=agent.requests.made,
            requests_failed=agent.requests.failed,
            last_failure=agent.requests.last_failure,
            commits_put_off=agent.requests.put_off,
            feedback_to_served_s=progress.feedback_to_served_s,
            seconds=round(time.monotonic() - started, 1),
            curve=[tuple(point) for point in progress.curve],
        )

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        async with httpx.AsyncClient(base_url=self._url, timeout=5.0) as client:
            while time.monotonic() < deadline:
                self._services.check()
                try:
                    if (await client.get("/health/ready")).status_code == httpx.codes.OK:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.2)
        raise DemoFailed(f"the explorer was not ready after {_START_S:.0f} s\n{self._services.last_words()}")

    async def _until_settled(self, ledger: Ledger) -> None:
        """Return when the trainer has nothing left to do and what it published last is served."""
        while True:
            counts = await asyncio.to_thread(ledger.reports.counts)
            newest, champion = (
                await asyncio.to_thread(ledger.versions.newest),
                await asyncio.to_thread(ledger.versions.champion),
            )
            held = max(counts[State.COMMITTED], counts[State.LEASED])  # less than a batch waits for more
            if held < self._settings.buffer.train_batch_size and newest.version == champion.version:
                return
            await asyncio.sleep(0.2)

    async def _watch(self, agent: Driver, ledger: Ledger) -> None:
        """Show the progress without end. Raises when a service has ended or progress stops."""
        last, moved = None, time.monotonic()
        while True:
            self._services.check()
            progress = await asyncio.to_thread(self._progress, agent, ledger)
            self._view.show(progress)
            if (progress.step, progress.requests) != last:
                last, moved = (progress.step, progress.requests), time.monotonic()
            if time.monotonic() - moved > _STALL_S:
                raise DemoFailed(f"nothing has moved for {_STALL_S:.0f} s\n{self._services.last_words()}")
            if progress.failed > _MOST_FAILURES:
                raise DemoFailed(f"{progress.failed} requests failed, the last: {agent.requests.last_failure}")
            await asyncio.sleep(0.5)

    def _progress(self, agent: Driver, ledger: Ledger) -> Progress:
        latencies = ledger.reports.feedback_to_served()
        return Progress(
            version=ledger.versions.champion().version,
            step=ledger.versions.newest().step,
            steps=self._options.steps,
            curve=[
                Point(each.version, each.reward_sum / each.rewarded, each.rewarded)
                for each in ledger.reports.rewards()
                if each.rewarded
            ],
            counts=ledger.reports.counts(),
            feedback_to_served_s=statistics.median(latencies) if latencies else None,
            requests=agent.requests.made,
            failed=agent.requests.failed,
        )


def url_of(settings: Settings) -> str:
    """Where the explorer listens."""
    return f"http://{settings.explorer.listen_address}:{settings.explorer.proxy_port}"
