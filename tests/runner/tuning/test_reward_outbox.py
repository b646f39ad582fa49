"""Rewards on their way to a service."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tuneloop.runner.tuning.attempts import RewardOutbox
from tuneloop.runner.tuning.experiment import Journal, RunResult
from tuneloop.runner.tuning.services import ServiceClient


class Taking(ServiceClient):
    """A service that takes all feedback, and keeps how many rewards came in each call."""

    def __init__(self) -> None:
        super().__init__("http://there")
        self.taken: list[int] = []

    async def feedback(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        self.taken.append(len(entries))
        return {}


async def test_results_that_come_soon_after_one_another_are_sent_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneloop.runner.tuning.attempts._GATHER_S", 1.0)
    journal, service = Journal(tmp_path / "journal.jsonl"), Taking()
    outbox = RewardOutbox(journal, {"model": service}, say=print)
    sent = []
    for number in range(12):
        result = RunResult(step=0, position=0, member=number, task_id="a", run_id=str(number), rewards={"model": 1.0})
        sent.append(asyncio.create_task(outbox.send(result)))
        for _ in range(3):  # the first of them has begun to be sent, if it is not waited for others
            await asyncio.sleep(0)
    await asyncio.gather(*sent)
    assert service.taken == [12]
    assert not journal.state.unacknowledged
    journal.close()
    async with service:
        pass
