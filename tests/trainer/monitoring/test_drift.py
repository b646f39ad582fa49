"""The monitors' rules on made-up steps, and the monitors on a real ledger."""

import json
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from tests.constants import section_of
from tests.factories import exchange, feedback
from tuneloop.shared.errors import LedgerUnavailable
from tuneloop.shared.ledger.facts import Facts, Rules
from tuneloop.shared.ledger.ledger import BatchRules
from tuneloop.shared.ledger.versions.drift import ReplyExcerpt
from tuneloop.shared.operations.diagnosis import Code, diagnose
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.settings.versions import DriftSettings
from tuneloop.trainer.monitoring import drift
from tuneloop.trainer.monitoring.drift import (
    ENTROPY,
    EXTREME,
    IDLE,
    KL,
    KL_BASE,
    LENGTH,
    LEVEL,
    RATER,
    REFUSALS,
    REWARD,
    SPREAD,
    TOOL_ERRORS,
    History,
)
from tuneloop.trainer.monitoring.monitors import Monitors, signals, tool_error

SMALL = section_of(DriftSettings, {"baseline": 4, "window": 3, "degraded": 1.0})


def after(options, *steps, history=None):
    """The history after steps with these signals."""
    history = history or History()
    first = max((step for values in history.series.values() for step, _ in values), default=0) + 1
    for step, seen in enumerate(steps, first):
        history = drift.with_step(options, history, step, seen)
    return history


def alarms(options, history):
    return {name for name, verdict in drift.verdicts(options, history).items() if verdict.over}


# Rules.


@pytest.mark.parametrize(
    ("alarm", "signal", "honest", "drifted"),
    [
        ("reply_length", LENGTH, [100, 190], 210),
        ("reply_length", LENGTH, [100, 52], 48),
        ("entropy", ENTROPY, [1.2, 0.41], 0.39),
        ("entropy", ENTROPY, [1.2, 3.5], 3.7),
        ("entropy", ENTROPY, [1.2, 1.2], 0.0),
        ("kl", KL, [0.0, 0.49], 0.51),
        ("refusals", REFUSALS, [0.05, 0.14], 0.16),
        ("tool_errors", TOOL_ERRORS, [0.0, 0.09], 0.11),
        ("single_rater", RATER, [0.1, 0.79], 0.81),
        ("extreme_rewards", EXTREME, [0.0, 0.04], 0.06),
    ],
)
def test_a_monitor_trips_beyond_its_threshold_and_not_before(alarm, signal, honest, drifted):
    first, later = honest
    quiet = after(SMALL, *[{signal: first}] * 4, *[{signal: later}] * 3)
    assert alarms(SMALL, quiet) == set()
    loud = after(SMALL, *[{signal: drifted}] * 3, history=quiet)
    assert alarms(SMALL, loud) == {alarm}


def test_a_distance_that_is_measured_now_and_then_holds_until_it_is_measured_again():
    history = after(SMALL, {KL_BASE: 0.2}, {}, {}, {KL_BASE: 0.8}, {}, {})
    assert history.series[KL_BASE] == [(1, 0.2), (2, 0.2), (3, 0.2), (4, 0.8), (5, 0.8), (6, 0.8)]
    assert drift.verdicts(SMALL, history)["kl"].value == pytest.approx(0.8)
    assert alarms(SMALL, history) == {"kl"}
    # Gone back to before the first, there is nothing to hold.
    assert after(SMALL, {}, history=drift.until(history, 0)).series[KL_BASE] == []
    # A method that looks at the base model itself takes over.
    assert alarms(SMALL, after(SMALL, *[{KL: 0.1}] * 3, history=history)) == set()


@pytest.mark.parametrize("level", [0.76, 0.24])
def test_a_reward_that_jumps_up_or_down_is_suspect_until_it_stays_there(level):
    before = after(SMALL, *[{LEVEL: 0.5}] * 9)
    assert drift.verdicts(SMALL, after(SMALL, *[{LEVEL: 0.5}] * 9)) == {}
    jumped = after(SMALL, *[{LEVEL: level}] * 5, history=before)
    assert alarms(SMALL, jumped) == {"reward_jump"}
    assert alarms(SMALL, after(SMALL, *[{LEVEL: level}] * 5, history=jumped)) == set()


# The reward against the evaluation.


def trained(options, *points, history=None):
    """A history with windows of these rewards, each followed by an evaluation of this score."""
    history = history or drift.with_score(options, History(), 0, points[0][1])
    for reward, score in points:
        history = after(options, *[{REWARD: reward}] * options.window, history=history)
        history = drift.with_score(options, history, history.series[REWARD][-1][0], score)
    return history


@pytest.mark.parametrize(
    ("points", "raised"),
    [
        ([(0.2, 0.5), (0.8, 0.3)], True),  # the reward rose, the evaluation fell
        ([(0.2, 0.5), (0.8, 0.9)], False),  # both rose
        ([(0.2, 0.5), (0.8, 0.45)], False),  # it fell by less than 0.1
        ([(0.8, 0.5), (0.2, 0.3)], False),  # both fell: no hack, but bad training
        ([(0.2, 0.5), (0.22, 0.3)], False),  # the reward rose by less than 0.05
        ([(0.2, 0.2), (0.5, 0.8), (0.9, 0.5)], True),  # learnt first, hacked then: still above the base model
        ([(0.2, 0.5), (0.4, 0.46), (0.6, 0.42), (0.8, 0.38)], True),  # little by little
    ],
)
def test_a_reward_that_rises_while_the_evaluation_falls_is_hacked(points, raised):
    assert alarms(SMALL, trained(SMALL, *points)) == ({"reward_hack"} if raised else set())


def test_the_base_models_score_is_compared_with_the_rewards_of_the_first_steps():
    history = drift.with_score(SMALL, History(), 0, 0.9)
    assert drift.verdicts(SMALL, history) == {}
    history = after(SMALL, *[{REWARD: 0.1}] * 3, *[{REWARD: 0.7}] * 3, history=history)
    assert alarms(SMALL, drift.with_score(SMALL, history, 6, 0.2)) == {"reward_hack"}


# Whether anything is learnt.

EQUAL, IDLE_ALL = {SPREAD: 0.0, REWARD: 1.0}, {REWARD: 0.5, SPREAD: 1.0, IDLE: 1.0}
NOISE = [0.02, -0.03, 0.01, 0.0, -0.02, 0.03, -0.01, 0.02, -0.01, 0.01]


def falling(by, first=0.8):
    return [{REWARD: first - by * step + NOISE[step % 10], SPREAD: 1.0, IDLE: 0.0} for step in range(10)]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([EQUAL] * 10, "all rewards of the last 10 steps are 1, so that no reply"),
        ([{REWARD: 0.0, SPREAD: 0.0}] * 10, "all rewards of the last 10 steps are 0, so that no reply"),
        ([IDLE_ALL] * 10, "100% of the tokens of the last 10 steps have advantage 0"),
        (falling(0.04), "the mean reward fell from 0.7987 to 0.4453 in the last 10 steps: lower"),
        (falling(0.04, first=0.0), "the mean reward fell from -0.001273 to -0.3547 in the last 10 steps"),
        ([EQUAL | {REWARD: 0.1 * 3 / 3}, EQUAL | {REWARD: 0.1}] * 5, "all rewards of the last 10 steps are 0.1"),
        ([EQUAL] * 9, None),
        ([*[EQUAL] * 9, EQUAL | {REWARD: 0.9}], None),  # each step is of one reward, but they differ
        ([{REWARD: 1.0, SPREAD: 0.5}] * 10, None),
        ([{REWARD: 1.0}] * 10, None),  # sft and distill compare none
        ([*[IDLE_ALL] * 9, IDLE_ALL | {IDLE: 0.9}], None),
        (falling(0.0), None),
        (falling(-0.04), None),
        (falling(0.002), None),
    ],
)
def test_ten_steps_that_teach_nothing_are_told_with_their_number(steps, told):
    history = after(SMALL, *steps)
    found = drift.verdicts(SMALL, history).get("not_learning")
    assert (found is not None and found.over) is (told is not None)
    if told:
        assert found.reason.startswith(told)


def test_a_reward_that_fell_is_told_until_it_hardly_falls():
    fell = after(SMALL, *falling(0.04))
    history = History(series=fell.series, raised={"not_learning": 10})
    slower = after(SMALL, *falling(0.008, first=0.42), history=history)
    assert alarms(SMALL, slower) >= {"not_learning"}
    assert "not_learning" not in alarms(SMALL, History(series=slower.series))
    assert "not_learning" not in alarms(SMALL, after(SMALL, *falling(-0.01, first=0.4), history=slower))


# Replies.


def reply(text="", calls=None, tools=("look_up",)):
    request = {"tools": [{"type": "function", "function": {"name": name}} for name in tools]}
    return ReplyExcerpt(text, None if calls is None else json.dumps(calls).encode(), json.dumps(request).encode())


def call(name="look_up", arguments="{}"):
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        (reply("Hello."), None),
        (reply(calls=[call()]), False),
        (reply(calls=[call(arguments='{"x": 1}'), call(arguments='{"x": ')]), True),
        (reply(calls=[call(arguments="[]")]), True),
        (reply(calls=[call(arguments="")]), True),
        (reply(calls=[call("destroy")]), True),
        (reply(calls=[call()], tools=()), True),
        (reply(calls=["nonsense"]), True),
        (reply(calls=[]), None),
        (reply('<tool_call>{"name": "look_up", '), True),
        (reply("<tool_call> is how a call begins", tools=()), None),
        (ReplyExcerpt("", json.dumps([call("any")]).encode(), None), False),
        (
            ReplyExcerpt("", json.dumps([call("any")]).encode(), b'{"tools": [{"name": "any", "input_schema": {}}]}'),
            False,
        ),
        (ReplyExcerpt("", b"no json", b"[]"), None),
    ],
)
def test_a_tool_call_is_wrong_if_it_could_not_be_made(made, wrong):
    assert tool_error(made) is wrong


# The monitors.


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("I'm sorry, but I can't do that.", 1.0),
        ("i CANNOT do this", 1.0),
        ("抱歉 我无法帮助你", 1.0),
        ("As an AI language model, I have no opinion.", 1.0),
        ("The canal is closed; I can help you with that.", 0.0),
        ("", 0.0),
    ],
)
def test_refusals_are_recognised_in_english_and_chinese(text, refused):
    patterns = DriftSettings().refusals_found
    assert signals([reply(text)] * 16, patterns) == {REFUSALS: refused}
    assert signals([reply(text)] * 15, patterns) == {}


class Trained:
    """What the monitors look at of a learner."""

    def __init__(self, steps=0):
        self.steps = steps
        self.actor = None


@pytest.fixture
def watching(settings, ledger):
    """Makes the monitors of an experiment; `but` are options of `monitor.drift`."""

    def make(**but):
        chosen = settings(monitor={"drift": {"baseline": 2, "window": 2} | but})
        watch = Monitors(chosen, ledger)
        return watch, chosen

    return make


def learn(watch, lengths, first=1):
    return [
        watch.after_step(Trained(step), {LENGTH: length}, version=step) for step, length in enumerate(lengths, first)
    ]


def test_an_alarm_is_kept_in_the_ledger_until_it_is_over(watching, ledger):
    watch, _ = watching(action="hold")
    assert watch.begin(Trained()) == {}
    curves = learn(watch, [10, 10, 10, 40])
    assert "drift/reply_length" not in curves[2]
    assert curves[3]["drift/reply_length"] == 2.5
    assert [each["drift/alarms"] for each in curves] == [0, 0, 0, 1]
    [alarm] = ledger.alarms.all()
    assert (alarm.name, alarm.step, alarm.version, alarm.value, alarm.threshold) == ("reply_length", 4, 4, 2.5, 2.0)
    assert alarm.reason == "the mean length of replies was 10 in the first 2 steps, and is 25 in the last 2"
    assert ledger.alarms.promotion_held()
    learn(watch, [10, 10], first=5)
    assert ledger.alarms.all() == []
    assert not ledger.alarms.promotion_held()


@pytest.mark.parametrize("method", ["ppo", "reinforce++", "reinforce", "kto", "sft"])
def test_ten_steps_of_equal_rewards_are_told_in_the_log_the_ledger_and_the_diagnosis(
    watching, settings, ledger, method
):
    watch = Monitors(settings(algorithm={"algorithm_type": method}), ledger)
    watch.begin(Trained())
    step = {REWARD: 1.0, "critic/rewards/max": 1.0, "critic/rewards/min": 1.0}
    with capture_logs() as said:
        for number in range(1, 11):
            seen = watch.after_step(Trained(number), step, version=number)
    if method == "sft":  # which imitates them
        assert (said, ledger.alarms.all()) == ([], [])
        return
    sentence = "all rewards of the last 10 steps are 1, so that no reply is better than another: give feedback"
    assert seen["drift/not_learning"] == 1.0
    assert [each["reason"].startswith(sentence) for each in said if each["event"] == "alarm_raised"] == [True]
    facts = Facts(now=0.0, rules=Rules(2), outbox=OutboxStatus(), ledger=ledger.reports.facts(BatchRules()))
    assert dict(diagnose(facts))[Code.NOT_LEARNING].startswith(sentence)
    watch.after_step(Trained(11), step | {"critic/rewards/min": 0.5, REWARD: 0.7}, version=11)
    assert ledger.alarms.all() == []


def test_extreme_rewards_hold_new_versions_unless_they_are_a_quarantined_raters(watching, ledger, monkeypatch):
    monkeypatch.setattr(DriftSettings, "rater_events", 10)
    watch, _ = watching()
    watch.begin(Trained())
    said = exchange()
    ledger.recording.record([said, *(feedback(msg_id=said.msg_id, source=f"r{n}", value=n - 5.0) for n in range(10))])
    curves = [watch.after_step(Trained(step), {REWARD: 0.5}, version=step) for step in (1, 2)]
    assert curves[1]["drift/extreme_rewards"] == pytest.approx(6 / 9)  # one of them alone is not heard
    assert curves[1][LEVEL] == 0.75
    assert [(alarm.name, alarm.holds) for alarm in ledger.alarms.all()] == [("extreme_rewards", True)]
    for number in range(10):
        ledger.raters.quarantine("acme", f"r{number}", by="eve", reason="it is extreme")
    assert "feedback/extreme" not in watch.after_step(Trained(3), {}, version=3)


def test_a_restart_changes_no_figure(watching, ledger):
    lengths = [10, 12, 11, 40, 50, 9, 10, 11]
    straight, chosen = watching()
    straight.begin(Trained())
    expected = learn(straight, lengths)
    (chosen.job_dir / "monitor" / "drift.json").unlink()
    found = []
    for first, last in pairwise([0, 3, 5, 8]):
        watch, _ = watching()
        watch.begin(Trained(first))
        learn(watch, [99, 99], first=last + 1)  # steps that no version contains
        watch.begin(Trained(first))
        found += learn(watch, lengths[first:last], first=first + 1)
    assert found == expected


def test_an_alarm_that_somebody_cleared_is_raised_again_only_after_it_was_over(watching, ledger):
    watch, _ = watching()
    watch.begin(Trained())
    learn(watch, [10, 10, 40, 40])
    ledger.alarms.clear("reply_length")
    learn(watch, [40, 40], first=5)
    watch, _ = watching()
    watch.begin(Trained(6))
    learn(watch, [40], first=7)
    assert ledger.alarms.all() == []
    learn(watch, [10, 10, 40, 40], first=8)
    assert [alarm.step for alarm in ledger.alarms.all()] == [10]


def evaluated(watching, ledger, tasks, *scores, first=1, **but):
    """Monitors that evaluate after each step, go on after `first - 1` of them, and see these scores."""
    _, chosen = watching()
    chosen.job_dir.mkdir(parents=True, exist_ok=True)
    path = chosen.job_dir / "tasks.jsonl"
    path.write_text("".join(f"{json.dumps({'prompt': each, 'answer': '12'})}\n" for each in tasks))
    evaluation = {"path": path, "every": 1} | but
    watch = Monitors(chosen.model_validate(chosen.model_dump() | {"monitor": {"evaluation": evaluation}}), ledger)
    found = iter(scores)
    watch._held_out.score = lambda actor: {"evaluation/score": next(found), "time/evaluation": 0.0}
    return watch, [watch.begin(Trained(first - 1)), *learn(watch, [10] * (len(scores) - (first == 1)), first=first)]


def test_other_tasks_or_another_judge_begin_with_a_new_baseline(watching, ledger):
    evaluated(watching, ledger, ["7+5="], 0.9, 0.9, 0.2)
    assert [each.name for each in ledger.alarms.all()] == ["degraded"]
    evaluated(watching, ledger, ["7+5="], 0.2, first=3)
    assert [each.name for each in ledger.alarms.all()] == ["degraded"]
    _, [_, first, second] = evaluated(watching, ledger, ["13-1="], 0.2, 0.3, first=4)
    assert ledger.alarms.all() == []
    assert "drift/degraded" not in first
    assert second["drift/degraded"] == 0.0
    evaluated(watching, ledger, ["13-1="], 0.1, first=6, judge="exact")
    assert ledger.alarms.all() == []
    evaluated(watching, ledger, ["13-1="], 0.9, 0.2, first=7, judge="exact")
    assert [each.name for each in ledger.alarms.all()] == ["degraded"]


def test_a_ledger_that_is_away_costs_a_reading_and_delays_the_alarm(watching, ledger, monkeypatch):
    watch, _ = watching()
    watch.begin(Trained())
    learn(watch, [10, 10, 40])

    def away(*_, **__):
        raise LedgerUnavailable("it is away")

    with monkeypatch.context() as patch, capture_logs() as said:
        for part, verb in (
            (ledger.drift, "newest_replies"),
            (ledger.drift, "largest_rater"),
            (ledger.alarms, "raise_alarm"),
            (ledger.alarms, "clear"),
        ):
            patch.setattr(part, verb, away)
        assert learn(watch, [40], first=4)[0]["drift/alarms"] == 0
    assert {each["event"] for each in said} == {"monitors_not_read", "alarm_not_recorded"}
    assert ledger.alarms.all() == []
    learn(watch, [40], first=5)
    assert [alarm.name for alarm in ledger.alarms.all()] == ["reply_length"]
