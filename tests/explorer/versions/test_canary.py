"""How a version that is being tried comes to its end by itself."""

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.checkpoints import register
from tests.explorer.conftest import Run
from tests.explorer.running import RunningExplorer, eventually, explorer_running, open_ledger, settings_for
from tests.explorer.versions.test_reload import actor, all_ready, candidate, model, until, until_ready, version
from tests.explorer.versions.test_trial import answered, by_hash, one_explorer, trying
from tuneloop.explorer.channel import ShadowReply
from tuneloop.explorer.metrics import Metrics, ProcessTotals, process_samples
from tuneloop.explorer.versions.trial import CanaryController, counts_of, figures_of, request_counts
from tuneloop.shared.errors import VersionRefused
from tuneloop.shared.evaluation.samples import Figures, Share
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Alarm

pytestmark = pytest.mark.contract

#: Of rewards that differ a little: `around` of them is the mean.
_SPREAD = (-0.1, 0.0, 0.1)


def rewarded(explorer: RunningExplorer, users: Iterator[int], *, champion: float, tried: float) -> dict[str, int]:
    """Which version answered each of some new users, who reward it; nobody met what was not meant for him."""
    found = {}
    for _ in range(20):
        number = next(users)
        reply = explorer.chat(user=f"user-{number}")
        assert reply.status_code == 200
        found[f"user-{number}"] = int(reply.headers["x-tuneloop-version"])
        reward = (tried if found[f"user-{number}"] else champion) + _SPREAD[number % 3]
        assert explorer.feedback(reply.json()["id"], reward=reward).status_code == 200
    explorer.until_flushed()
    return found


def rewarded_until(explorer: RunningExplorer, state: VersionState, *, champion: float, tried: float) -> dict[str, int]:
    """The same, until version 1 has come to a state."""
    users, found = count(), dict[str, int]()
    while version(explorer, 1).state is VersionState.CANARY:
        assert len(found) < 2000
        found |= rewarded(explorer, users, champion=champion, tried=tried)
    assert version(explorer, 1).state is state
    return found


def ended(explorer: RunningExplorer) -> tuple[str, str]:
    """What was decided about version 1, and why, by the explorer, with figures."""
    event = explorer.ledger.versions.events(1)[-1]
    assert event.actor == "explorer"
    assert event.details["tried"]
    return str(event.action), event.reason or ""


def test_a_worse_version_is_rolled_back_and_got_no_more_than_its_share(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles, rewards=20)
    found = rewarded_until(explorer, VersionState.ROLLED_BACK, champion=0.9, tried=0.1)
    wanted = by_hash()
    assert all(number <= wanted.get(user, 1) for user, number in found.items())
    assert 0 < sum(found.values()) <= 0.5 * len(found)
    action, reason = ended(explorer)
    assert action == "rolled_back"
    assert "less" in reason
    eventually(lambda: [each.weights for each in doubles] == [model(explorer)] * 2)
    until_ready(explorer, 2)
    assert set(answered(explorer).values()) == {0}
    eventually(lambda: explorer.decisions("rolled_back") == 1)


def test_a_better_version_is_promoted_and_then_answers_everybody(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles, "ab", rewards=20)
    rewarded_until(explorer, VersionState.CHAMPION, champion=0.1, tried=0.9)
    assert ended(explorer)[0] == "promoted"
    eventually(lambda: [each.weights for each in doubles] == [actor(explorer, 1)] * 2)
    until_ready(explorer, 2)
    assert set(answered(explorer).values()) == {1}


def test_a_version_whose_engine_fails_is_rolled_back_and_nobody_notices(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles)
    (tried,) = [each for each in doubles if each.weights == actor(explorer, 1)]
    tried.status = 500
    for _ in range(50):
        assert set(answered(explorer).values()) == {0}
        if version(explorer, 1).state is not VersionState.CANARY:
            break
    tried.status = 200
    until(explorer, 1, VersionState.ROLLED_BACK)
    assert "failed" in ended(explorer)[1]


def test_a_client_whose_request_no_engine_can_answer_rolls_nothing_back(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    """A grammar that refers to itself, of which vLLM dies in one request, not in one version."""
    explorer = trying(running_explorer, doubles)
    for each in doubles:
        each.fails_at = lambda request: "$ref" in str(request.get("structured_outputs"))
    poison = {"structured_outputs": {"json": {"$ref": "#"}}}
    statuses = [explorer.chat(user=f"user-{number}", **poison).status_code for number in range(20)]
    assert set(statuses) <= {500, 502}
    for _ in range(3):
        assert set(answered(explorer).values()) == {0, 1}
    assert version(explorer, 1).state is VersionState.CANARY
    assert explorer.decisions("rolled_back") == 0


@pytest.mark.parametrize("mode", ["canary", "shadow"])
def test_a_version_that_refuses_is_rolled_back_however_it_writes_it(
    running_explorer: Run, doubles: list[EngineDouble], mode: str
) -> None:
    explorer = trying(running_explorer, doubles, mode, latency=None)
    for each in doubles:
        each.says["global_step_1"] = "i CANNOT do that"
    for _ in range(20):
        answered(explorer)
        if version(explorer, 1).state is not VersionState.CANARY:
            break
    until(explorer, 1, VersionState.ROLLED_BACK)
    assert "refusals" in ended(explorer)[1]


def test_what_somebody_promotes_while_it_is_looked_at_is_not_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path, ["http://one", "http://two"], rollout={"mode": "canary", "window": 1e-9})
    ledger, metrics = open_ledger(settings), Metrics()
    register(ledger, settings.job_dir)
    ledger.versions.begin_canary(1, by="explorer", reason="a tenth")
    figures = ledger.comparisons.figures

    def looked_at_slowly(number: int, *args: Any, **but: Any) -> Figures:
        if number == 1:
            ledger.versions.appoint(1, instead_of=0, by="admin:anna", reason="it is good")
        return figures(number, *args, **but)

    monkeypatch.setattr(ledger.comparisons, "figures", looked_at_slowly)
    with pytest.raises(VersionRefused, match="champion by now"):
        asyncio.run(CanaryController(settings, ledger, totals=ProcessTotals(metrics.registry), metrics=metrics).turn())
    assert ledger.versions.champion().version == 1
    ledger.close()


def test_the_end_of_the_window_decides_about_who_is_neither_better_nor_worse(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = all_ready(running_explorer, doubles, rollout={"mode": "canary", "window": 0.5})
    candidate(explorer)
    until(explorer, 1, VersionState.ROLLED_BACK)
    assert "window" in ended(explorer)[1]


def test_while_an_alarm_holds_nothing_is_promoted(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    rollout = {"mode": "canary", "window": 0.5, "undecided": "promote"}
    explorer = all_ready(running_explorer, doubles, rollout=rollout)
    explorer.ledger.alarms.raise_alarm(Alarm("length", "replies got long", holds=True))
    candidate(explorer)
    explorer.ledger.versions.begin_canary(1, by="admin:anna", reason="to see")
    eventually(lambda: sorted(each.version for each in explorer.services.fleet.engines) == [0, 1])
    eventually(lambda: explorer.ledger.alarms.looks > 2)
    assert version(explorer, 1).state is VersionState.CANARY
    explorer.ledger.alarms.clear("length")
    until(explorer, 1, VersionState.CHAMPION)


def test_a_new_explorer_decides_what_the_one_before_began(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    with one_explorer(tmp_path) as run:
        explorer = trying(run, doubles, rewards=20)
        rewarded(explorer, count(), champion=0.9, tried=0.1)
    with explorer_running(explorer.settings) as again:
        eventually(lambda: sorted(each.version for each in again.services.fleet.engines) == [0, 1])
        until_ready(again, 2)
        rewarded_until(again, VersionState.ROLLED_BACK, champion=0.9, tried=0.1)


def test_a_shadow_gets_copies_which_nobody_sees_and_nobody_keeps(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles, "shadow")
    (tried,) = [each for each in doubles if each.weights == actor(explorer, 1)]
    assert set(answered(explorer).values()) == {0}
    assert set(answered(explorer, stream=True).values()) == {0}
    expected = 2 * sum(by_hash().values())
    eventually(lambda: explorer.metrics().get("tuneloop_copies_total") == expected)
    assert 'tuneloop_copies_total{outcome="answered"}' in explorer.http.get("/metrics").text
    assert 0 < len(tried.chats) <= expected
    assert explorer.metrics()["tuneloop_canary_share"] == 0
    assert {each.experiences[0].version_max for each in explorer.exchanges()} == {0}
    assert len(explorer.exchanges()) == 2 * len(by_hash())
    assert all(each.in_flight == 0 for each in explorer.services.fleet.engines)


def test_a_shadow_that_fails_is_rolled_back(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    explorer = trying(running_explorer, doubles, "shadow", share=1.0)
    (tried,) = [each for each in doubles if each.weights == actor(explorer, 1)]
    tried.status = 500
    for _ in range(20):
        assert set(answered(explorer).values()) == {0}
        if version(explorer, 1).state is not VersionState.CANARY:
            break
    until(explorer, 1, VersionState.ROLLED_BACK)
    assert "failed" in ended(explorer)[1]
    assert {each.engine for each in explorer.exchanges()} == {1 - doubles.index(tried)}


def test_a_shadow_that_breaks_no_guard_is_promoted_at_the_end_of_its_window(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    rollout = {"mode": "shadow", "share": 1.0, "window": 8.0, "latency": None}
    explorer = all_ready(running_explorer, doubles, rollout=rollout)
    candidate(explorer)
    until(explorer, 1, VersionState.CANARY)
    while version(explorer, 1).state is VersionState.CANARY:
        assert set(answered(explorer).values()) <= {0, 1}
    until(explorer, 1, VersionState.CHAMPION)
    assert "window" in ended(explorer)[1]


def test_a_new_candidate_is_tried_after_one_that_was_rolled_back(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles)
    explorer.ledger.versions.roll_back(1, by="admin:anna", reason="it swears")
    candidate(explorer)
    until(explorer, 2, VersionState.CANARY)
    until_ready(explorer, 2)
    assert version(explorer, 1).state is VersionState.ROLLED_BACK


def test_figures_of_copies() -> None:
    copies = [
        ShadowReply(1, False, refused=True, seconds=2.0, tokens=10),
        ShadowReply(1, False, seconds=4.0, tokens=20),
    ]
    found = figures_of(counts_of([*copies, ShadowReply(1, True)]))
    assert (found.failures, found.refusals) == (Share(1, 3), Share(1, 2))
    assert (found.length.mean, found.latency.mean) == (15.0, pytest.approx(0.2))


def test_what_engines_refuse_counts_for_nothing_and_workers_are_added_up() -> None:
    control, worker = Metrics(), Metrics()
    for outcome in ("whole", "failed", "refused"):
        worker.count_reply(3, outcome)
    control.count_reply(3, "whole")
    totals = ProcessTotals(control.registry)
    totals.update(0, process_samples(worker.registry))
    assert request_counts(totals) == {"3": Share(1, 3)}
