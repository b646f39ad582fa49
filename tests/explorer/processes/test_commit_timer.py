"""With `buffer.commit: auto` a running explorer commits what is due, without a word of a client."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for
from tests.factories import exchange, feedback
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.processes.commit_timer import CommitTimer
from tuneloop.shared.experience import State
from tuneloop.shared.job_marks import committed_stamp
from tuneloop.shared.ledger.training import automatic_commit

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic_commit, "QUIET_S", 0.5)


@contextmanager
def automatic(tmp_path: Path, double: EngineDouble, **buffer: object) -> Iterator[RunningExplorer]:
    settings = settings_for(tmp_path, [double.url])
    changed = settings.buffer.model_copy(update={"commit": "auto", **buffer})
    with explorer_running(settings.model_copy(update={"buffer": changed})) as running:
        yield running


def test_a_thumb_is_all_that_it_takes(tmp_path: Path, double: EngineDouble) -> None:
    with automatic(tmp_path, double) as explorer:
        mark = committed_stamp(explorer.settings.job_dir)
        rated, unrated = (explorer.chat().json()["id"] for _ in range(2))
        explorer.feedback(rated)
        eventually(lambda: explorer.counts()[State.COMMITTED] == 1)
        assert committed_stamp(explorer.settings.job_dir) > mark  # the trainer wakes up
        assert explorer.counts()[State.RECORDED] == 1
        assert explorer.rows(f"SELECT state FROM experiences WHERE msg_id = '{unrated}'") == [("recorded",)]


def test_by_default_nothing_is_committed(running_explorer, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    assert explorer.settings.buffer.commit == "manual"
    explorer.feedback(explorer.chat().json()["id"])
    explorer.until_flushed()
    for _ in range(10):
        explorer.until_looked()
    assert explorer.counts()[State.COMMITTED] == 0


def test_an_explorer_that_starts_again_goes_on(tmp_path: Path, double: EngineDouble) -> None:
    settings = settings_for(tmp_path, [double.url])
    with explorer_running(settings) as before:
        before.feedback(before.chat().json()["id"])
        before.until_flushed()
    with automatic(tmp_path, double) as explorer:
        eventually(lambda: explorer.counts()[State.COMMITTED] == 1)


def test_until_it_is_committed_training_says_when(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic_commit, "QUIET_S", 3600.0)
    with automatic(tmp_path, double, group_by="run") as explorer:
        said = explorer.chat().json()["id"]
        explorer.feedback(said)
        explorer.until_flushed()
        reasons = {each["code"]: each["sentence"] for each in explorer.http.get("/training").json()["reasons"]}
        assert (
            "1 experience with a reward or an edited answer, but not committed: the first is released by itself at 2"
            in (reasons["not_committed"])
        )
        assert "when all replies of its run have a reward" in reasons["not_committed"]
        waits = explorer.http.get(f"/v1/chat/completions/{said}/explain").json()["replies"][0]["waits_for"]
        assert "it is released by itself at 2" in waits[0]["sentence"]
        assert "and commit them" not in str(reasons)


async def test_the_leading_explorer_alone_commits(running_explorer, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    ledger = explorer.ledger
    said = exchange(msg_id="chatcmpl-old")
    ledger.recording.record([said, feedback(msg_id=said.msg_id)])
    timer = timer_of(explorer, proxy_port=1)  # of a second explorer
    eventually(lambda: ledger.explorers.lead(explorer.settings.explorer_name) is not None)
    await timer.look()
    assert ledger.reports.counts()[State.COMMITTED] == 0


def timer_of(explorer: RunningExplorer, taken: Sequence[bool] = (True,), **of_explorer: Any) -> CommitTimer:
    """`taken` says, whenever it is asked, whether all that was acknowledged is in the database."""
    changed = {
        "buffer": explorer.settings.buffer.model_copy(update={"commit": "auto"}),
        "explorer": explorer.settings.explorer.model_copy(update=of_explorer),
    }

    async def is_taken(timeout_s: float) -> bool:
        return taken[0]

    settings = explorer.settings.model_copy(update=changed)
    return CommitTimer(settings, explorer.ledger, wait_until_taken=is_taken, metrics=Metrics())


async def test_it_waits_for_feedback_on_its_way(running_explorer, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    said, taken = exchange(msg_id="chatcmpl-old"), [False]
    explorer.ledger.recording.record([said, feedback(msg_id=said.msg_id)])
    timer = timer_of(explorer, taken)
    await timer.look()
    assert explorer.ledger.reports.counts()[State.COMMITTED] == 0
    taken[0] = True
    await timer.look()
    assert explorer.ledger.reports.counts()[State.COMMITTED] == 1


async def test_a_policy_may_be_committed_by_hand(running_explorer, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    by_hand = explorer.ledger.policies.create("tuned", settings={"buffer.commit": "manual"}, by="tests").id
    for policy in (0, by_hand):
        said = exchange(msg_id=f"chatcmpl-of-{policy}", policy=policy)
        explorer.ledger.recording.record([said, feedback(msg_id=said.msg_id)])
    await timer_of(explorer).look()
    committed = explorer.rows("SELECT policy, state FROM experiences ORDER BY policy")
    assert committed == [(0, "committed"), (by_hand, "rewarded")]
