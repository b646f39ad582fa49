"""What a version that is being tried gets, and what it never gets."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.doubles.engine import EngineDouble
from tests.explorer.checkpoints import register
from tests.explorer.conftest import Run, one_explorer
from tests.explorer.engines.test_client import engine
from tests.explorer.running import RunningExplorer, eventually, explorer_running, open_ledger, settings_for
from tests.explorer.versions.test_reload import actor, all_ready, candidate, model, until, until_ready, version
from tuneloop.explorer.engines.fleet import EngineState, TrafficSplit
from tuneloop.explorer.metrics import Metrics, ProcessTotals, process_samples
from tuneloop.explorer.proxy.proxy import RequestFailures
from tuneloop.explorer.versions.trial import (
    CanaryController,
    CanaryTrial,
    division,
    request_counts,
    to_try_on,
)
from tuneloop.shared.errors import VersionRefused
from tuneloop.shared.evaluation.samples import Figures, Share
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Alarm

pytestmark = pytest.mark.contract

USERS = [f"user-{number}" for number in range(60)]
SHARE = 0.3


def trying(running_explorer: Run, doubles: list[EngineDouble], mode: str = "canary", **but: Any) -> RunningExplorer:
    """An explorer that tries version 1."""
    rollout = {"mode": mode, "share": SHARE} | but
    explorer = all_ready(running_explorer, doubles, rollout=rollout)
    for each in doubles:
        each.weights = model(explorer)
    candidate(explorer)
    until(explorer, 1, VersionState.CANARY)
    eventually(lambda: sorted(each.version for each in explorer.services.fleet.engines) == [0, 1])
    until_ready(explorer, 2)
    return explorer


def answered(explorer: RunningExplorer, **but: Any) -> dict[str, int]:
    """Which version answers each user."""
    replies = {user: explorer.chat(user=user, **but) for user in USERS}
    assert {reply.status_code for reply in replies.values()} == {200}
    return {user: int(reply.headers["x-tuneloop-version"]) for user, reply in replies.items()}


def by_hash(version: int = 1) -> dict[str, int]:
    split = TrafficSplit(version, share=SHARE)
    return {user: version if split.answers(f"default:{user}") else 0 for user in USERS}


def reasons(explorer: RunningExplorer, number: int) -> list[tuple[str, str]]:
    return [(str(each.action), each.reason or "") for each in explorer.ledger.versions.events(number)]


def test_about_its_share_of_the_engines_but_one_stays_with_the_champion() -> None:
    down = EngineState.DOWN

    def numbers(*engines: Any, share: float) -> list[int]:
        return [each.number for each in to_try_on(engines, 2, share)]

    assert numbers(engine(0, 1), engine(1, 1), share=0.1) == [1]
    assert numbers(engine(0, 2), engine(1, 1), share=0.1) == [0]
    assert numbers(*(engine(number, 1) for number in range(4)), share=0.5) == [3, 2]
    assert numbers(engine(0, 1), engine(1, 1), share=0.9) == [1]
    assert numbers(engine(0, 1, state=down), engine(1, 2), share=0.5) == []
    assert numbers(engine(0, 1, state=down), share=0.5) == []


def test_what_is_tried_no_more_gets_nothing_as_long_as_an_engine_has_it() -> None:
    split = TrafficSplit(2, share=0.1)
    assert division([engine(0, 1), engine(1, 2)], split, 1, None) == TrafficSplit(2)
    assert division([engine(0, 1), engine(1, 2, state=EngineState.RELOADING)], split, 1, None) == TrafficSplit(2)
    assert division([engine(0, 1), engine(1, 2)], split, 2, None) is None
    assert division([engine(0, 1), engine(1, 2, state=EngineState.DOWN)], split, 1, None) is None
    assert division([engine(0, 1)], None, 1, None) is None
    tried: Any = engine(9, 3)  # all that is asked of a version is its number
    assert division([engine(0, 1), engine(1, 2)], split, 1, CanaryTrial(tried, "ab", 0.5, 0.0)) == TrafficSplit(2)
    trial = CanaryTrial(tried, "ab", 0.5, 0.0)
    assert division([engine(0, 1), engine(1, 1)], TrafficSplit(2), 1, trial) == TrafficSplit(3, share=0.5)


@pytest.mark.parametrize("mode", ["canary", "ab"])
def test_it_answers_its_share_and_always_the_same_users(
    running_explorer: Run, doubles: list[EngineDouble], mode: str
) -> None:
    explorer = trying(running_explorer, doubles, mode)
    assert explorer.ledger.versions.champion().version == 0
    assert answered(explorer) == by_hash()
    assert answered(explorer, metadata={"task_id": "other"}) == by_hash()
    assert {each.weights for each in doubles} == {model(explorer), actor(explorer, 1)}
    found = explorer.metrics()
    assert (found["tuneloop_canary_version"], found["tuneloop_canary_share"]) == (1, SHARE)
    (event,) = [each for each in explorer.ledger.versions.events(1) if each.action == "canary"]
    assert (event.actor, event.details) == ("explorer", {"mode": mode, "share": SHARE})


def test_without_a_user_runs_of_a_task_stay_together_and_others_are_on_their_own(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles)
    for task, wanted in list(by_hash().items())[:12]:
        assert explorer.chat(metadata={"task_id": task}).headers["x-tuneloop-version"] == str(wanted)
    assert {explorer.version() for _ in range(60)} == {0, 1}


def test_the_champions_traffic_never_goes_to_what_is_tried(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    """Where the champion has no engine left, the one of the version that is tried becomes its own."""
    explorer = trying(running_explorer, doubles)
    champions, tried = sorted(doubles, key=lambda each: each.weights == actor(explorer, 1))
    champions.dead = True
    eventually(lambda: explorer.services.fleet.engines[doubles.index(champions)].state == EngineState.DOWN)
    allowed = by_hash()
    assert all(found <= allowed[user] for user, found in answered(explorer).items())
    eventually(lambda: tried.weights == model(explorer))
    assert set(answered(explorer).values()) == {0}
    assert version(explorer, 1).state is VersionState.CANARY
    champions.dead = champions.paused = False
    eventually(lambda: answered(explorer) == by_hash())


def test_where_what_is_tried_has_no_engine_the_champion_answers(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles)
    (tried,) = [each for each in doubles if each.weights == actor(explorer, 1)]
    tried.status = 500  # its requests are asked of another engine
    assert set(answered(explorer).values()) == {0}


def test_when_both_fail_what_the_champion_cannot_answer_is_not_asked_of_what_is_tried(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles)
    champions, tried = sorted(doubles, key=lambda each: each.weights == actor(explorer, 1))
    champions.status = 500
    heard = len(tried.chats)
    user = next(user for user, number in by_hash().items() if number == 0)
    assert explorer.chat(user=user).status_code == 500
    assert len(tried.chats) == heard


@pytest.mark.parametrize("stream", [True, False])
def test_no_answer_in_time_is_the_fault_of_the_version_that_was_asked_last(
    running_explorer: Run, doubles: list[EngineDouble], stream: bool
) -> None:
    explorer = trying(running_explorer, doubles)
    champions, tried = sorted(doubles, key=lambda each: each.weights == actor(explorer, 1))
    tried.status, champions.stalls_after, champions.hangs = 500, 2, not stream
    explorer.services.proxy._timeout_s = 0.3
    user = next(user for user, number in by_hash().items() if number == 1)
    before = failure_counts(explorer)
    assert "engine_timeout" in explorer.chat(user=user, stream=stream).text
    assert failure_counts(explorer) - before == Counter({"0": 1, "1": 1})


def failure_counts(explorer: RunningExplorer) -> Counter[str]:
    """How many replies have failed, by version."""
    families = text_string_to_metric_families(explorer.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    counted = [each for each in samples if each.name == "tuneloop_replies_total"]
    return Counter({each.labels["version"]: int(each.value) for each in counted if each.labels["outcome"] == "failed"})


def test_requests_at_which_every_engine_fails_roll_nothing_back(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles, share=0.5, failures=0.01)
    for each in doubles:
        each.fails_at = lambda request: request.get("seed") == 13
    asked = [len(each.chats) for each in doubles]
    assert {explorer.chat(user=user).status_code for user in USERS} == {200}
    for user in USERS:
        assert explorer.chat(user=user, seed=13).status_code == 500
    eventually(lambda: all(len(each.chats) >= before + 40 for each, before in zip(doubles, asked, strict=True)))
    time.sleep(1.0)  # several looks at the trial
    counted = [line for line in explorer.http.get("/metrics").text.splitlines() if line.startswith("tuneloop_replies")]
    assert not [line for line in counted if 'outcome="failed"' in line and 'version="1"' in line]
    assert [line for line in counted if 'outcome="refused"' in line and 'version="1"' in line]
    assert version(explorer, 1).state is VersionState.CANARY
    (tried,) = [each for each in doubles if each.weights == actor(explorer, 1)]
    tried.fails_at = lambda request: request.get("seed") == 17  # which the champion answers
    for user in USERS * 2:
        assert explorer.chat(user=user, seed=17).status_code == 200
    until(explorer, 1, VersionState.ROLLED_BACK)


def test_the_failures_of_one_key_that_nobody_else_saw_count_once() -> None:
    metrics = Metrics()
    failures = RequestFailures(metrics)
    for _ in range(30):
        failures.alone(1, "acme/one")
        failures.alone(2, "acme/one")
        failures.elsewhere(1, answered=False)
    failures.alone(1, "acme/two")
    failures.elsewhere(1, answered=True)
    for _ in range(5):
        failures.alone(3, "")  # a program of this machine
    totals = ProcessTotals(metrics.registry)
    assert {name: share.found for name, share in request_counts(totals).items()} == {"1": 3, "2": 1, "3": 5}


def test_when_it_is_rolled_back_its_engine_goes_back(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    explorer = trying(running_explorer, doubles)
    explorer.ledger.versions.roll_back(1, by="admin:anna", reason="it swears")
    eventually(lambda: [each.weights for each in doubles] == [model(explorer)] * 2)
    until_ready(explorer, 2)
    assert set(answered(explorer).values()) == {0}
    eventually(lambda: explorer.services.fleet.split is None)
    assert explorer.metrics()["tuneloop_canary_version"] == 0


def test_when_it_is_promoted_all_engines_get_it(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    explorer = trying(running_explorer, doubles)
    explorer.ledger.versions.appoint(1, instead_of=0, by="admin:anna", reason="it is better")
    eventually(lambda: [each.weights for each in doubles] == [actor(explorer, 1)] * 2)
    until_ready(explorer, 2)
    eventually(lambda: explorer.services.fleet.split is None)
    assert set(answered(explorer).values()) == {1}


def test_an_older_version_that_is_appointed_is_served_and_a_newer_candidate_waits_while_it_is_pinned(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = all_ready(running_explorer, doubles)
    candidate(explorer)
    until(explorer, 1, VersionState.CHAMPION)
    explorer.ledger.versions.pin(0, instead_of=1, by="admin:anna", reason="the release")
    candidate(explorer)
    eventually(lambda: [each.weights for each in doubles] == [model(explorer)] * 2)
    until_ready(explorer, 2)
    assert explorer.version() == 0
    assert version(explorer, 2).state is VersionState.CANDIDATE
    explorer.ledger.versions.unpin(by="admin:anna")
    until(explorer, 2, VersionState.CHAMPION)
    assert explorer.version() == 2


def test_a_candidate_waits_until_the_one_that_is_tried_is_decided_about(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles)
    candidate(explorer)
    assert answered(explorer) == by_hash()
    assert version(explorer, 2).state is VersionState.CANDIDATE
    explorer.ledger.versions.promote(1)
    until(explorer, 2, VersionState.CANARY)
    assert reasons(explorer, 1)[-1][0] == "promoted"


def test_a_new_explorer_goes_on_with_what_was_tried(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    with one_explorer(tmp_path) as run:
        explorer = trying(run, doubles)
    for each in doubles:
        each.weights = model(explorer)
    settings = explorer.settings.model_copy(
        update={"rollout": explorer.settings.rollout.model_copy(update={"mode": "all", "share": None})}
    )
    with explorer_running(settings) as again:
        eventually(lambda: sorted(each.version for each in again.services.fleet.engines) == [0, 1])
        until_ready(again, 2)
        assert answered(again) == by_hash()
        assert [each[0] for each in reasons(again, 1)] == ["published", "canary"]


def test_a_version_that_cannot_be_loaded_is_never_tried(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    explorer = all_ready(running_explorer, doubles, rollout={"mode": "canary"})
    for each in doubles:
        each.keeps_old_weights = True
    candidate(explorer)
    until(explorer, 1, VersionState.REJECTED)
    until_ready(explorer, 2)
    assert [each[0] for each in reasons(explorer, 1)] == ["published", "rejected"]
    assert set(answered(explorer).values()) == {0}


@pytest.mark.parametrize(
    "settings", [{"rollout": {"mode": "rolling"}}, {"min_running_model_num": 1}], ids=["rolling", "told"]
)
def test_an_engine_stays_as_long_as_no_other_one_would_answer(
    running_explorer: Run, doubles: list[EngineDouble], settings: dict[str, Any]
) -> None:
    explorer = all_ready(running_explorer, doubles, **settings)
    doubles[1].dead = True
    eventually(lambda: explorer.services.fleet.engines[1].state == EngineState.DOWN)
    candidate(explorer)
    explorer.until_looked()
    assert version(explorer, 1).state is VersionState.CANDIDATE
    assert explorer.version() == 0
    doubles[1].dead = doubles[1].paused = False
    until(explorer, 1, VersionState.CHAMPION)
    eventually(lambda: [each.weights for each in doubles] == [actor(explorer, 1)] * 2)


def test_a_version_is_not_promoted_for_the_engine_that_it_has_killed(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = all_ready(running_explorer, doubles, rollout={"mode": "rolling"})
    doubles[0].dies_at_resume = True  # with the new weights in it
    candidate(explorer)
    eventually(lambda: explorer.services.fleet.engines[0].state == EngineState.DOWN)
    explorer.until_looked()
    assert version(explorer, 1).state is VersionState.CANDIDATE
    assert explorer.version() == 0
    assert doubles[1].posts == []


# How a version that is being tried comes to its end by itself.


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


def test_a_version_that_refuses_is_rolled_back_however_it_writes_it(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles, latency=None)
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


def test_a_new_candidate_is_tried_after_one_that_was_rolled_back(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = trying(running_explorer, doubles)
    explorer.ledger.versions.roll_back(1, by="admin:anna", reason="it swears")
    candidate(explorer)
    until(explorer, 2, VersionState.CANARY)
    until_ready(explorer, 2)
    assert version(explorer, 1).state is VersionState.ROLLED_BACK


def test_what_engines_refuse_counts_for_nothing_and_workers_are_added_up() -> None:
    control, worker = Metrics(), Metrics()
    for outcome in ("whole", "failed", "refused"):
        worker.count_reply(3, outcome)
    control.count_reply(3, "whole")
    totals = ProcessTotals(control.registry)
    totals.update(0, process_samples(worker.registry))
    assert request_counts(totals) == {"3": Share(1, 3)}
