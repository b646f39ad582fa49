"""Traffic that is held out of training, and candidates that are compared with the champion on it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble, logprobs_of
from tests.explorer.checkpoints import register
from tests.explorer.running import RunningExplorer, eventually, explorer_running, open_ledger, settings_for
from tests.explorer.versions.test_gate import events
from tests.explorer.versions.test_reload import until, until_ready, version
from tests.factories import exchange, experience, feedback
from tuneloop.explorer.engines.version_routing import is_held_out
from tuneloop.explorer.versions.gate import Gate
from tuneloop.shared.evaluation.off_policy import MIN_EFFECTIVE_SIZE
from tuneloop.shared.evaluation.scores import Figure
from tuneloop.shared.evaluation.tasks import fingerprint
from tuneloop.shared.experience import HELD_OUT, Evaluator, State, VersionState, pack_ids, pack_logprobs
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import EvaluationSettings, MonitorSettings
from tuneloop.shared.settings.versions import GateSettings as GateSettings

ENOUGH = int(MIN_EFFECTIVE_SIZE) + 20

Rows = Sequence[tuple[int, float]]


def settings_with(tmp_path: Path, doubles: Sequence[EngineDouble], **replay: Any) -> Settings:
    """Settings of a gate that has nothing but a replay."""
    for each in doubles:
        each.weights = tmp_path / "model"
    gate = GateSettings.model_validate({"mode": "block", "replay": {"share": 0.5} | replay})
    return settings_for(tmp_path, [each.url for each in doubles]).model_copy(update={"gate": gate})


# What is held out.


def test_a_user_is_held_out_as_a_whole_and_never_trained_on(tmp_path: Path, double: EngineDouble) -> None:
    gate = GateSettings.model_validate({"replay": {"share": 0.5}})
    settings = settings_for(tmp_path, [double.url]).model_copy(update={"gate": gate})
    users = [f"user-{number}" for number in range(8)]
    out = {user for user in users if is_held_out(f"default:{user}", 0.5)}
    assert 0 < len(out) < len(users)
    with explorer_running(settings) as explorer:
        said = [
            explorer.chat(user=user, metadata={"task_id": f"task-{number}"}, top_p=top_p).json()["id"]
            for number, user in enumerate(users)
            for top_p in (1, 0.5)
        ]
        explorer.feedback(*said)
        kept = explorer.exchanges()
        reasons = [(each.user in out, each.experiences[0].drop_reason) for each in kept]
        assert reasons == [(is_out, HELD_OUT if is_out else None) for is_out, _ in reasons]
        assert explorer.counts()[State.DROPPED] == 2 * len(out)
        assert explorer.commit().json()["committed"] == 2 * (len(users) - len(out))
        assert len(explorer.ledger.training.held_out(99)) == len(out)  # the others were sampled from a nucleus


@pytest.mark.parametrize(
    ("asked", "key"),
    [({"user": "anna", "metadata": {"task_id": "t"}}, "default:anna"), ({"metadata": {"task_id": "t"}}, "default:t")],
)
def test_the_key_is_the_user_or_else_the_task(
    tmp_path: Path, double: EngineDouble, asked: dict[str, Any], key: str
) -> None:
    share = 0.5 if is_held_out(key, 0.5) else 0.0
    settings = settings_with(tmp_path, [double], share=share)
    with explorer_running(settings.model_copy(update={"gate": settings.gate.model_copy(update={"mode": "off"})})) as it:
        it.chat(**asked)
        assert {each.experiences[0].drop_reason for each in it.exchanges()} == {HELD_OUT if share else None}


def test_without_a_key_each_reply_is_held_out_by_itself_and_who_opts_out_is_not(
    tmp_path: Path, double: EngineDouble
) -> None:
    settings = settings_with(tmp_path, [double])
    with explorer_running(settings) as explorer:
        for _ in range(20):
            explorer.chat()
        explorer.chat(metadata={"train": False})
        *kept, last = explorer.exchanges()
        expected = [HELD_OUT if is_held_out(f"default:{each.msg_id}", 0.5) else None for each in kept]
        assert [each.experiences[0].drop_reason for each in kept] == expected
        assert set(expected) == {HELD_OUT, None}
        assert last.experiences[0].drop_reason == "opt_out"


# What comes of it.


def rows_near(settings: Settings, count: int) -> Iterator[tuple[int, float]]:
    """Tokens that version 1 finds nearly as likely as the base model does, with how much likelier."""
    tried, base = settings.job_dir / "global_step_1" / "actor", settings.model.model_path
    for token in range(100_000):
        [now], [before] = (logprobs_of(each, [7, token]) for each in (tried, base))
        if 0.1 < abs(now - before) < 0.5:
            yield token, now - before
            count -= 1
        if not count:
            return


def held(ledger: Ledger, settings: Settings, rewards: Rows, **but: Any) -> None:
    """Replies of one token each that the base model sampled and nobody trains on, with their rewards."""
    said = []
    for token, _ in rewards:
        told = logprobs_of(settings.model.model_path, [7, token])
        its = {"prompt_ids": pack_ids([7]), "completion_ids": pack_ids([token]), "logprobs": pack_logprobs(told)}
        said.append(exchange(experiences=(experience(drop_reason=HELD_OUT, **its),), **but))
    heard = [feedback(msg_id=each.msg_id, value=reward) for each, (_, reward) in zip(said, rewards, strict=True)]
    ledger.recording.record([*said, *heard])


def tried(settings: Settings, rewards: Rows, *, until_it_is: VersionState, **but: Any) -> tuple[Any, list[Figure]]:
    """The event of version 1's evaluation, and its figures."""
    with explorer_running(settings) as explorer:
        until_ready(explorer, 2)
        held(explorer.ledger, settings, rewards, **but)
        register(explorer.ledger, settings.job_dir)
        until(explorer, 1, until_it_is)
        eventually(lambda: bool(events(explorer, 1)))
        (event,) = events(explorer, 1)
        return event, list(explorer.ledger.evaluations.of(1, Evaluator.ENGINE))


@pytest.mark.parametrize(("sign", "state"), [(1, VersionState.CHAMPION), (-1, VersionState.REJECTED)])
def test_a_candidate_that_would_have_earned_less_is_rejected(
    tmp_path: Path, doubles: list[EngineDouble], sign: int, state: VersionState
) -> None:
    settings = settings_with(tmp_path, doubles)
    rewards = [(token, float(sign * apart > 0)) for token, apart in rows_near(settings, ENOUGH)]
    event, figures = tried(settings, rewards, until_it_is=state)
    told = event.details["replay"]
    assert (event.details["passed"], event.details["instead_of"]) == (sign > 0, 0)
    assert (told["replies"], told["concluded"]) == (ENOUGH, True)
    # The champion sampled them itself, so that its estimate is their mean.
    assert told["champion"] == pytest.approx(sum(reward for _, reward in rewards) / ENOUGH)
    assert (told["candidate"] - told["champion"]) * sign > 0.05
    assert {each.metric for each in figures} == {"tasks", "replay", "replay_champion", "replay_size", "replay_of"}
    assert {each.samples for each in figures if each.metric != "tasks"} == {ENOUGH}
    if sign < 0:
        assert event.reason.startswith("on held-out replies it would earn")


def test_a_slice_that_would_earn_less_is_seen(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    settings = settings_with(tmp_path, doubles, margin=10.0)
    rewards = [(token, float(apart < 0)) for token, apart in rows_near(settings, ENOUGH)]
    event, _ = tried(settings, rewards, until_it_is=VersionState.REJECTED, task_id="sums/1")
    assert event.reason.startswith("on the slice sums of held-out replies it would earn")
    assert event.details["replay"]["slices"]["sums"]["concluded"] is True


def test_from_too_few_nothing_is_concluded_and_that_is_said(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    settings = settings_with(tmp_path, doubles)
    rewards = [(token, float(apart < 0)) for token, apart in rows_near(settings, 50)]
    event, _ = tried(settings, rewards, until_it_is=VersionState.CHAMPION)
    assert event.details["replay"]["concluded"] is False
    assert "the replay is inconclusive: 50 held-out replies are worth" in event.reason


def test_with_nothing_held_out_yet_a_candidate_passes(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    event, figures = tried(settings_with(tmp_path, doubles), [], until_it_is=VersionState.CHAMPION)
    assert event.details["replay"] == {"replies": 0, "size": 0.0, "concluded": False, "needed": MIN_EFFECTIVE_SIZE}
    assert {each.metric for each in figures} == {"tasks", "replay_of"}


def test_replies_that_fill_the_engine_or_were_sampled_otherwise_are_not_replayed(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    settings = settings_with(tmp_path, doubles)
    full = {"prompt_ids": pack_ids([7] * 4095), "completion_ids": pack_ids([8]), "logprobs": pack_logprobs([-1.0])}
    with explorer_running(settings) as explorer:
        until_ready(explorer, 2)
        for its in (full, {"temperature": 0.5}):
            said = exchange(experiences=(experience(drop_reason=HELD_OUT, **its),))
            explorer.ledger.recording.record([said, feedback(msg_id=said.msg_id)])
        register(explorer.ledger, settings.job_dir)
        until(explorer, 1, VersionState.CHAMPION)
        eventually(lambda: bool(events(explorer, 1)))
        (event,) = events(explorer, 1)
        assert event.details["replay"]["replies"] == 0


def test_tasks_and_a_replay_go_together(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    settings = settings_with(tmp_path, doubles)
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "7+5="}], "answer": "12"}\n')
    for each in doubles:
        each.says = {tmp_path.name: "12", "global_step_1": "12"}
    both = settings.model_copy(update={"monitor": MonitorSettings(evaluation=EvaluationSettings(path=path))})
    rewards = [(token, float(apart < 0)) for token, apart in rows_near(settings, ENOUGH)]
    event, _ = tried(both, rewards, until_it_is=VersionState.REJECTED)
    assert event.details["candidate"]["score"] == event.details["champion"]["score"] == 1.0
    assert event.reason.startswith("on held-out replies it would earn")
    assert ";" not in event.reason


def test_a_new_champion_is_asked_the_rows_that_the_old_one_was(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    settings = settings_with(tmp_path, doubles, margin=100.0)
    rewards = [(token, float(apart > 0)) for token, apart in rows_near(settings, ENOUGH)]
    with explorer_running(settings) as explorer:
        until_ready(explorer, 2)
        held(explorer.ledger, settings, rewards)
        for number in (1, 2):
            register(explorer.ledger, settings.job_dir)
            until(explorer, number, VersionState.CHAMPION)
            until_ready(explorer, 2)
            eventually(lambda at=number: bool(events(explorer, at)))
        (first,), (second,) = events(explorer, 1), events(explorer, 2)
        assert first.details["instead_of"] == 0
        assert second.details["instead_of"] == 1
        assert second.details["replay"]["champion"] == pytest.approx(first.details["replay"]["candidate"])


async def test_figures_beside_another_champion_do_not_count(tmp_path: Path, double: EngineDouble) -> None:
    settings = settings_with(tmp_path, [double])
    ledger = open_ledger(settings)
    tasks = Figure("tasks", "", float(fingerprint([], settings.monitor.evaluation, settings.judge)), 0.0, 1)
    ledger.evaluations.record(0, Evaluator.TRAINER, [tasks])
    register(ledger, settings.job_dir)
    candidate, champion = ledger.versions.candidate(), ledger.versions.champion()
    assert candidate is not None
    gate = Gate(settings, ledger)
    for beside, admitted in ((None, False), (7.0, False), (0.0, True)):
        beside_it = [Figure("replay_of", "", beside, 0.0, 1)] if beside is not None else []
        ledger.evaluations.record(1, Evaluator.TRAINER, [tasks, *beside_it])
        assert await gate.admits(candidate, champion) is admitted
    ledger.close()


# The form of replies.


@pytest.mark.parametrize(("ends_by", "passes"), [("stop", False), ("length", True)])
def test_replies_that_lose_their_form_are_seen(
    tmp_path: Path, doubles: list[EngineDouble], ends_by: str, passes: bool
) -> None:
    """Where all are cut off, the champion's have no form either."""
    path = tmp_path / "tasks.jsonl"
    tasks = [{"messages": [{"role": "user", "content": "7+5="}], "answer": "12", "format": each} for each in FORMS]
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    for each in doubles:
        each.weights = tmp_path / "model"
        each.says = {tmp_path.name: "12", "global_step_1": "It is 12."}
        each.ends_by = ends_by
    monitor, gate = MonitorSettings(evaluation=EvaluationSettings(path=path)), GateSettings(mode="block")
    settings = settings_for(tmp_path, [each.url for each in doubles])
    with explorer_running(settings.model_copy(update={"gate": gate, "monitor": monitor})) as explorer:
        until_ready(explorer, 2)
        register(explorer.ledger, explorer.settings.job_dir)
        until(explorer, 1, VersionState.CHAMPION if passes else VersionState.REJECTED)
        eventually(lambda: bool(events(explorer, 1)))
        (event,) = events(explorer, 1)
        told = event.details["candidate"]["malformed"], event.details["champion"]["malformed"]
        assert told == (1.0, float(passes))
        if not passes:
            assert "100.0% of its replies lack the form that their task demands, 0.0% of" in reason(explorer)


FORMS = ("json", r"\d+")


def reason(explorer: RunningExplorer) -> str:
    return version(explorer, 1).reason or ""
