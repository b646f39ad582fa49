"""The reward rule: from the feedback events about a reply to the one number that training uses.

A metric's value is that of its latest event; where several raters reported it, the median of each one's latest, and the
mean of two. What was said of the reply's run counts under a metric where nothing was said of the reply itself; with
`run_feedback: add` both are added. The reward is the sum of the metrics' values, each times its weight, then clipped;
no rater's part of it is beyond the clip either. Where the application itself spoke, or a rater that it trusts, others'
words under that metric do not count, unless the rule wants the mean of all.

Metrics without a weight, labels without a value and comments are kept but do not count. So are
edited answers, unless the rule gives them a value: that counts under the metric `reward`, where their source reports
nothing else under it.

All that one call or one key says of a reply under a metric, whatever sources it names, is one word beside others':
names cost nothing.
"""

import json
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from tuneloop.shared.experience import KEY_SOURCE, MAX_REWARD, Kind
from tuneloop.shared.ledger.raters.voices import median_by_voice, voice_of
from tuneloop.shared.settings.feedback import RewardRule

#: What an edited answer counts under, if it counts.
_MAIN = "reward"

#: The kinds that can change a reward under any rule. The others are kept for what a number cannot say.
_REWARDING = frozenset({Kind.NUMBER, Kind.BOOLEAN, Kind.LABEL, Kind.PREFERENCE, Kind.RETRACTION})


class Event(NamedTuple):
    """A feedback event as it bears on one reply; `preferred`: whether that is the better one of a preference's two.

    `trusted`: its rater is no voter, but whose word settles it. `of_run`: it is about the reply's whole run.
    """

    id: int
    kind: Kind
    metric: str
    value: float | None
    text: str | None
    source: str | None
    preferred: bool
    received_at: float
    call_id: str | None = None
    trusted: bool = False
    of_run: bool = False


class Reward(NamedTuple):
    """A reward, and when the last feedback that counts came."""

    value: float
    at: float


def definition(rule: RewardRule) -> str:
    """The rule in words that are the same for the same rule: canonical JSON."""
    values = rule.model_dump(mode="json")
    if values["demonstration_value"] is None:  # rules were written down before there was this option
        del values["demonstration_value"]
    if values["aggregate"] == "mean":  # nor was there the median
        del values["aggregate"]
    if values["run_feedback"] == "fallback":  # nor a choice of what feedback on a run does
        del values["run_feedback"]
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def rule_of(text: str) -> RewardRule:
    """The rule of a `definition`. One that says nothing of how raters are aggregated is older than the median."""
    return RewardRule.model_validate({"aggregate": "mean"} | json.loads(text))


def rewarding(rule: RewardRule, kind: str) -> bool:
    """Whether feedback of this kind can change a reward."""
    return kind in _REWARDING or (kind == Kind.DEMONSTRATION and rule.demonstration_value is not None)


def in_window(rule: RewardRule, *, sampled_at: float, received_at: float) -> bool:
    """Whether feedback received then still counts for a reply sampled then."""
    return rule.attribution_window is None or received_at <= sampled_at + rule.attribution_window


def reward_of(rule: RewardRule, events: Iterable[Event], *, sampled_at: float) -> Reward | None:
    """What the events, in the order in which they came, make of a reply; None if nothing in them counts.

    >>> thumb = Event(1, Kind.BOOLEAN, "reward", 1.0, None, None, False, received_at=5.0)
    >>> reward_of(RewardRule(), [thumb, thumb._replace(value=0.0, received_at=6.0)], sampled_at=0.0)
    Reward(value=0.0, at=6.0)
    """
    counting = counting_events(rule, events, sampled_at=sampled_at)
    if not counting:
        return None
    return Reward(
        _weighted_sum(rule, counting),
        max(event.received_at for _, event, _ in counting),
    )


def counting_events(rule: RewardRule, events: Iterable[Event], *, sampled_at: float) -> list[tuple[str, Event, float]]:
    """The events that make the reward of a reply, each with its metric and value."""
    latest: dict[tuple[str, str | None, bool], Event] = {}
    for event in events:
        if rewarding(rule, event.kind) and in_window(rule, sampled_at=sampled_at, received_at=event.received_at):
            latest[event.metric, event.source, event.of_run] = event
    valued = [(event, value) for event in latest.values() if (value := _value(rule, event)) is not None]
    sources_of_main = {
        (event.source, event.of_run)
        for event, _ in valued
        if event.metric == _MAIN and event.kind is not Kind.DEMONSTRATION
    }
    counting = [
        (_metric(event), event, value)
        for event, value in valued
        if _metric(event) in rule.weights
        and not (event.kind is Kind.DEMONSTRATION and (event.source, event.of_run) in sources_of_main)
    ]
    if rule.run_feedback == "fallback":
        own = {metric for metric, event, _ in counting if not event.of_run}
        counting = [each for each in counting if not each[1].of_run or each[0] not in own]
    if rule.aggregate == "median":
        settled = {(metric, event.of_run) for metric, event, _ in counting if event.trusted}
        counting = [each for each in counting if each[1].trusted or (each[0], each[1].of_run) not in settled]
    return counting


def default_of(rule: RewardRule, *, sampled_at: float) -> Reward | None:
    """What a reply gets that had no feedback until its window closed."""
    if rule.default is None or rule.attribution_window is None:
        return None
    return Reward(rule.default, sampled_at + rule.attribution_window)


def _metric(event: Event) -> str:
    return _MAIN if event.kind is Kind.DEMONSTRATION else event.metric


def _weighted_sum(rule: RewardRule, counting: Iterable[tuple[str, Event, float]]) -> float:
    by_subject: dict[tuple[str, bool], list[tuple[Event, float]]] = {}
    for metric, event, value in counting:
        by_subject.setdefault((metric, event.of_run), []).append((event, value))
    return _clip(rule, sum(_part(rule, rule.weights[metric], said) for (metric, _), said in by_subject.items()))


def _part(rule: RewardRule, weight: float, events: Sequence[tuple[Event, float]]) -> float:
    """A metric's part of the reward."""
    if rule.aggregate == "mean":
        return weight * fmean(value for _, value in events)
    return median_by_voice((_voice(event), _clip(rule, weight * value)) for event, value in events)


def _voice(event: Event) -> object:
    """Whose word an event is: that of its key, or else of its call."""
    source = event.source or ""
    return voice_of(source) if source.startswith(KEY_SOURCE) or event.call_id is None else event.call_id


def _clip(rule: RewardRule, value: float) -> float:
    low, high = rule.clip or (-MAX_REWARD, MAX_REWARD)
    return min(max(value, low), high)


def is_clipped(rule: RewardRule, metric: str, value: float) -> bool:
    """Whether a number under a metric that counts is more than a reward can be."""
    part = rule.weights.get(metric, 0.0) * value
    return _clip(rule, part) != part


def _value(rule: RewardRule, event: Event) -> float | None:
    match event.kind:
        case Kind.NUMBER:
            return event.value
        case Kind.BOOLEAN:
            return rule.boolean_values[bool(event.value)]
        case Kind.PREFERENCE:
            return rule.boolean_values[event.preferred]
        case Kind.LABEL:
            return rule.label_values.get(event.text or "")
        case Kind.DEMONSTRATION:
            return rule.demonstration_value
        case Kind.COMMENT | Kind.RETRACTION:
            return None
