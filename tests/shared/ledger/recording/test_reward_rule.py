"""The rule by itself: what events make of a reply."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneloop.shared.experience import MAX_REWARD, Kind
from tuneloop.shared.ledger.recording.reward_rule import (
    Event,
    Reward,
    default_of,
    definition,
    in_window,
    reward_of,
    rewarding,
    rule_of,
)
from tuneloop.shared.settings.feedback import RewardRule

RULE = RewardRule()
MEAN = RewardRule(aggregate="mean", clip=None)


def event(**but: Any) -> Event:
    fields: dict[str, Any] = {
        "id": 1,
        "kind": Kind.NUMBER,
        "metric": "reward",
        "value": 1.0,
        "text": None,
        "source": None,
        "preferred": False,
        "received_at": 10.0,
    }
    return Event(**fields | but)


def value(rule: RewardRule, *events: Event, sampled_at: float = 0.0) -> float | None:
    reward = reward_of(rule, events, sampled_at=sampled_at)
    return None if reward is None else reward.value


def label(text: str, **but: Any) -> Event:
    return event(kind=Kind.LABEL, value=None, text=text, **but)


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        (event(value=0.25), 0.25),
        (event(kind=Kind.BOOLEAN, value=1.0), 3.0),
        (event(kind=Kind.BOOLEAN, value=0.0), -2.0),
        (label("good"), 0.5),
        (label("unheard of"), None),
        (event(kind=Kind.PREFERENCE, value=None, preferred=True), 3.0),
        (event(kind=Kind.PREFERENCE, value=None, preferred=False), -2.0),
        (event(kind=Kind.COMMENT, value=None, text="good"), None),
        (event(kind=Kind.DEMONSTRATION, value=None, text="good"), None),
        (event(kind=Kind.RETRACTION, value=None), None),
    ],
)
def test_each_kind_is_worth_what_the_rule_says(said: Event, worth: float | None) -> None:
    assert value(RewardRule(boolean_values=(-2.0, 3.0), label_values={"good": 0.5}, clip=None), said) == worth


def test_metrics_are_added_by_their_weights_and_others_do_not_count() -> None:
    rule = RewardRule(weights={"help": 2.0, "harm": -1.0})
    said = [event(metric="help", value=0.5), event(metric="harm", value=0.25), event(metric="reward", value=9.0)]
    assert value(rule, *said) == 0.75
    assert value(rule, said[2]) is None


def test_the_median_of_the_sources_counts_and_each_with_its_latest() -> None:
    said = [event(source="a", value=1.0), event(source="b", value=1.0), event(source="a", value=0.2), event(value=0.0)]
    assert value(RULE, *said) == 0.2
    assert value(MEAN, *said) == pytest.approx(0.4)


def test_two_sources_are_averaged() -> None:
    assert value(RULE, event(source="a", value=0.25), event(source="b", value=0.75)) == 0.5


def test_one_source_cannot_say_more_than_the_clip_lets_it() -> None:
    """Else one of two would decide alone, however the sum is clipped."""
    said = [event(source="a", value=1.0), event(source="b", value=-1e6)]
    assert value(RULE, *said) == 0.0
    assert value(MEAN.model_copy(update={"clip": (-1.0, 1.0)}), *said) == -1.0


def test_many_names_in_one_call_are_one_word() -> None:
    """The 99 sources that made a +1 into -0.98."""
    flood = [event(source=f"name-{number}", value=-1.0, call_id="one call") for number in range(99)]
    assert value(RULE, event(source="ann", value=1.0, call_id="ann's"), *flood) == 0.0
    two = [event(source=name, value=1.0, call_id=name) for name in ("ann", "ben")]
    assert value(RULE, *two, *flood) == 1.0


def of_run(**but: Any) -> Event:
    return event(of_run=True, **but)


@pytest.mark.contract
def test_a_replys_own_feedback_goes_before_its_runs_under_each_metric() -> None:
    rule = RewardRule(weights={"reward": 1.0, "tone": 1.0})
    said = [event(value=0.1), of_run(value=0.9), of_run(source="b", value=0.9), of_run(metric="tone", value=0.5)]
    assert value(rule, *said) == value(rule, *reversed(said)) == pytest.approx(0.6)
    nothing_own = [event(kind=Kind.RETRACTION, value=None), label("unheard of", source="b")]
    assert value(rule, *said, *nothing_own) == 1.0


@pytest.mark.contract
def test_feedback_on_a_run_is_added_where_the_rule_says_so() -> None:
    rule = RewardRule(run_feedback="add", clip=(-2.0, 2.0))
    assert value(rule, event(value=0.1), of_run(value=1.0)) == pytest.approx(1.1)
    assert value(rule, of_run(value=1.0)) == 1.0


def test_a_rule_that_does_not_add_is_the_same_as_before_there_was_a_choice() -> None:
    old = '{"aggregate":"median","attribution_window":null,"boolean_values":[0.0,1.0],"clip":[-1.0,1.0],"default":null,'
    before = RULE.model_copy(update={"unfinished_runs": "count"})
    assert definition(before) == old + '"label_values":{},"weights":{"reward":1.0}}'
    assert rule_of(definition(RewardRule(run_feedback="add"))) == RewardRule(run_feedback="add")


def test_a_trusted_word_settles_its_metric_among_all_that_were_said_of_the_same() -> None:
    others = [event(source=name, value=1.0) for name in "bcd"]
    trusted = event(source="a", value=0.0, trusted=True, received_at=3.0)
    assert reward_of(RULE, [trusted, *others], sampled_at=0.0) == Reward(0.0, 3.0)
    assert value(RULE, *others, trusted, trusted._replace(source="e", value=1.0)) == 0.5
    assert value(MEAN, *others, trusted) == 0.75
    assert value(RULE, *others, trusted._replace(of_run=True)) == 1.0, "a reply's own feedback goes before its run's"
    assert value(RewardRule(weights={"reward": 1.0, "tone": 1.0}), *others, trusted._replace(metric="tone")) == 1.0


@pytest.mark.parametrize(("clip", "reward"), [(None, MAX_REWARD), ((-1.0, 1.0), 1.0), ((-1.0, 5e6), 5e6)])
def test_the_sum_is_clipped(clip: tuple[float, float] | None, reward: float) -> None:
    assert value(RewardRule(clip=clip, weights={"reward": 10.0}), event(value=MAX_REWARD)) == reward


def test_feedback_counts_until_the_window_closes_and_its_last_moment_belongs_to_it() -> None:
    rule = RewardRule(attribution_window=10.0)
    assert value(rule, event(received_at=15.0), sampled_at=5.0) == 1.0
    assert value(rule, event(received_at=15.1), sampled_at=5.0) is None
    assert value(rule, event(value=0.5), event(received_at=15.1), sampled_at=5.0) == 0.5
    assert in_window(RULE, sampled_at=0.0, received_at=1e12)


def test_the_default_is_for_a_window_that_has_closed() -> None:
    assert default_of(RewardRule(attribution_window=10.0, default=-1.0), sampled_at=5.0) == Reward(-1.0, 15.0)
    assert default_of(RewardRule(attribution_window=10.0), sampled_at=5.0) is None
    assert default_of(RULE, sampled_at=5.0) is None


def test_a_retraction_takes_back_what_its_source_said_and_no_more() -> None:
    taken_back = event(kind=Kind.RETRACTION, value=None, source="a")
    said = [event(source="a", value=0.0), event(source="b", value=1.0)]
    assert value(RULE, *said, taken_back) == 1.0
    assert value(RULE, said[0], taken_back) is None
    assert value(RULE, said[0], taken_back, event(source="a", value=0.5)) == 0.5
    assert value(RULE, said[0], taken_back._replace(metric="other")) == 0.0


_events = st.builds(
    event,
    kind=st.sampled_from(Kind),
    metric=st.sampled_from(["reward", "help", "other"]),
    value=st.floats(-MAX_REWARD, MAX_REWARD),
    text=st.sampled_from(["good", "bad", None]),
    source=st.sampled_from(["a", "b", None]),
    preferred=st.booleans(),
    received_at=st.floats(0, 100),
    call_id=st.sampled_from([None, "x", "y"]),
    of_run=st.booleans(),
).map(lambda said: said._replace(trusted=said.source is None))
_rules = st.builds(
    RewardRule,
    weights=st.dictionaries(st.sampled_from(["reward", "help"]), st.floats(-10, 10)),
    aggregate=st.sampled_from(["median", "mean"]),
    label_values=st.dictionaries(st.sampled_from(["good", "bad"]), st.floats(-10, 10)),
    run_feedback=st.sampled_from(["fallback", "add"]),
    clip=st.sampled_from([None, (-1.0, 1.0), (0.0, 0.5)]),
    attribution_window=st.none() | st.floats(1, 100),
)


@given(_rules, st.lists(_events))
def test_a_reward_lies_within_its_bounds(rule: RewardRule, said: list[Event]) -> None:
    found = value(rule, *said)
    low, high = rule.clip or (-MAX_REWARD, MAX_REWARD)
    assert found is None or low <= found <= high


@given(
    _rules, st.lists(_events), _events.filter(lambda last: rewarding(last.kind) and last.kind is not Kind.DEMONSTRATION)
)
def test_only_the_last_of_a_source_counts(rule: RewardRule, said: list[Event], last: Event) -> None:
    last = last._replace(received_at=0.0)
    statement = (last.metric, last.source, last.of_run)
    of_others = [each for each in said if (each.metric, each.source, each.of_run) != statement]
    # Not the bare value: floats are added in another order.
    assert value(rule, *said, last) == pytest.approx(value(rule, *of_others, last))


@given(_rules, st.lists(_events))
def test_words_never_change_a_reward(rule: RewardRule, said: list[Event]) -> None:
    counting = [each for each in said if each.kind not in (Kind.COMMENT, Kind.DEMONSTRATION)]
    assert value(rule, *said) == value(rule, *counting)


@given(_rules)
def test_a_definition_is_the_rule_and_the_same_for_the_same_rule(rule: RewardRule) -> None:
    turned = dict(reversed(rule.weights.items()))
    assert rule_of(definition(rule)) == rule
    assert definition(rule.model_copy(update={"weights": turned})) == definition(rule)


def test_many_names_of_one_key_are_one_word_beside_another_keys() -> None:
    flood = [event(source=f"key:eve/name-{n}", value=-1.0, call_id=f"call-{n}") for n in range(99)]
    two = [event(source=f"key:web-{n}/ann", value=1.0, call_id=f"other-{n}") for n in range(2)]
    assert value(RULE, *two, *flood) == 1.0
    of_one_key = [event(source=f"key:web/{n}", value=float(n < 2), call_id=f"call-{n}") for n in range(3)]
    assert value(RULE, *of_one_key) == 1.0
    without_a_name = event(source="key:eve", value=-1.0, call_id="call-99")
    assert value(RULE, event(source="key:web", value=1.0, call_id="other"), *flood[:3], without_a_name) == 0.0
