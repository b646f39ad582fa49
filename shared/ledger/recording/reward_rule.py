"""The reward rule: from the feedback events about a reply to the one number that training uses.

A metric's value is that of its latest event; where several raters reported it, the median of each one's latest, and the
mean of two. What was said of the reply's run counts under a metric where nothing was said of the reply itself; with
`run_feedback: add` both are added. What was said of a run whose last call was cut off does not count. The reward is the
sum of the metrics' values, each times its weight, then clipped; no rater's part of it is beyond the clip either. Where
the application itself gave feedback, or a rater that it trusts, others' feedback under that metric does not count,
unless the rule wants the mean of all.

Metrics without a weight, labels without a value and comments are kept but do not count. Nor do edited answers: they say
what should have been said, not what the reply was worth.

All that one call or one key says of a reply under a metric, whatever sources it names, is one word beside others':
names cost nothing.
"""

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from statistics import fmean
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select, tuple_

from tuneloop.shared.experience import KEY_SOURCE, MAX_REWARD, Kind, RaterState, message_of, rater_of, voice_of
from tuneloop.shared.ledger.storage.database import find, is_among, portions
from tuneloop.shared.ledger.storage.schema import experiences, feedback, raters
from tuneloop.shared.settings.feedback import RewardRule

#: The kinds that can change what a reply is trained with. The others are kept for what a number cannot say.
_REWARDING = frozenset({*Kind} - {Kind.COMMENT})


class Event(NamedTuple):
    """A feedback event about one reply; `preferred`: the reply is the better one of a preference.

    `trusted`: a rater whose feedback decides. `of_run`: about the reply's run; `unfinished`: the run's last call was
    cut off. `weight`, above 0 and at most 1, is the rater's weight. `repeated_at`: the time of its last repeat.
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
    weight: float = 1.0
    repeated_at: float | None = None
    unfinished: bool = False


class Reward(NamedTuple):
    """A reward, the time of its last feedback, and the valid edit; `value` None: edited and not rated."""

    value: float | None
    at: float
    edit: int | None = None


class Fate(StrEnum):
    COUNTS = "counts"
    EDIT_STANDS = "edit_stands"
    REPLACED = "replaced"  # by a later event of the same source, or a later edited answer
    RETRACTED = "retracted"
    RETRACTION = "retraction"
    COMMENT = "comment"
    NO_WEIGHT = "no_weight"  # in reward.weights
    NO_VALUE = "no_value"  # a label that is not in reward.label_values
    OUT_OF_WINDOW = "out_of_window"
    SETTLED = "settled"  # by a trusted rater
    RUN_FEEDBACK_UNUSED = "run_feedback_unused"  # the reply has feedback of its own under the metric
    UNFINISHED_RUN = "unfinished_run"  # the last call of the run was cut off
    QUARANTINED = "quarantined"
    LATE = "late"  # it came after the reply was leased or trained on


class EventFate(NamedTuple):
    """What became of an event: its value, that times the metric's weight, and the id of what came in its place."""

    fate: Fate
    value: float | None = None
    part: float | None = None
    replaced_by: int | None = None


#: The rule of a call without feedback of its own: it has the reward of its run's last one.
OF_ITS_RESULT = '{"of":"the last call of its run"}'

#: The rule of a row of a file: the file says what is learnt.
OF_A_FILE = '{"of":"a line of a file"}'

OF_NO_FEEDBACK = frozenset({OF_ITS_RESULT, OF_A_FILE})


def definition(rule: RewardRule) -> str:
    values = rule.model_dump(mode="json")
    if values["aggregate"] == "mean":  # rules were written down before there was the median
        del values["aggregate"]
    if values["run_feedback"] == "fallback":  # nor a choice of what feedback on a run does
        del values["run_feedback"]
    if values["unfinished_runs"] == "count":  # nor of what unfinished runs earn
        del values["unfinished_runs"]
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def rule_of(text: str) -> RewardRule:
    """The rule of a `definition`; those written before there was the median, or with edits' values, too."""
    values = {"aggregate": "mean", "unfinished_runs": "count"} | json.loads(text)
    values.pop("demonstration_value", None)
    return RewardRule.model_validate(values)


def rewarding(kind: str) -> bool:
    return kind in _REWARDING


def in_window(rule: RewardRule, *, sampled_at: float, received_at: float) -> bool:
    return rule.attribution_window is None or received_at <= sampled_at + rule.attribution_window


def reward_of(rule: RewardRule, events: Iterable[Event], *, sampled_at: float) -> Reward | None:
    """What the events, in the order in which they came, make of a reply; None if nothing in them counts.

    >>> thumb = Event(1, Kind.BOOLEAN, "reward", 1.0, None, None, False, received_at=5.0)
    >>> reward_of(RewardRule(), [thumb, thumb._replace(value=0.0, received_at=6.0)], sampled_at=0.0)
    Reward(value=0.0, at=6.0, edit=None)
    """
    said = list(events)
    counting = counting_events(rule, said, sampled_at=sampled_at)
    # The latest edited answer that was not retracted: of the reply, or else of its run.
    latest: dict[tuple[str, str | None, bool], Event] = {}
    for event in _in_time(rule, said, sampled_at):
        if event.kind in (Kind.DEMONSTRATION, Kind.RETRACTION):
            about = event.metric, event.source, event.of_run
            latest.pop(about, None)  # so that the last entry is the latest event
            latest[about] = event
    standing = [event for event in latest.values() if event.kind is Kind.DEMONSTRATION]
    edit = next((each for of_run in (False, True) for each in reversed(standing) if each.of_run is of_run), None)
    heard = [event for event, _ in counting] + ([edit] if edit else [])
    if not heard:
        return None
    return Reward(
        _clip(rule, sum(parts(rule, counting).values())) if counting else None,
        max(event.received_at for event in heard),
        edit.id if edit else None,
    )


def counting_events(rule: RewardRule, events: Iterable[Event], *, sampled_at: float) -> list[tuple[Event, float]]:
    latest: dict[tuple[str, str | None, bool], Event] = {}
    for event in _in_time(rule, events, sampled_at):
        if event.kind is not Kind.DEMONSTRATION:
            latest[event.metric, event.source, event.of_run] = event
    counting = [
        (event, value)
        for event in latest.values()
        if event.metric in rule.weights
        and (value := _value(rule, event)) is not None
        and not _is_of_no_end(rule, event)
    ]
    if rule.run_feedback == "fallback":
        own = {event.metric for event, _ in counting if not event.of_run}
        counting = [each for each in counting if not each[0].of_run or each[0].metric not in own]
    if rule.aggregate == "median":
        settled = {(event.metric, event.of_run) for event, _ in counting if event.trusted}
        counting = [each for each in counting if each[0].trusted or (each[0].metric, each[0].of_run) not in settled]
    return counting


def fates(rule: RewardRule, events: Iterable[Event], *, sampled_at: float) -> dict[int, EventFate]:
    said = list(events)
    values = {event.id: value for event, value in counting_events(rule, said, sampled_at=sampled_at)}
    own = {event.metric for event in said if event.id in values and not event.of_run}
    reward = reward_of(rule, said, sampled_at=sampled_at)
    edit = reward.edit if reward else None
    latest: dict[object, Event] = {}
    for event in _in_time(rule, said, sampled_at):
        about = event.metric, event.source, event.of_run
        if event.kind is not Kind.DEMONSTRATION:
            latest[about, False] = event
        if event.kind in (Kind.DEMONSTRATION, Kind.RETRACTION):
            latest[about, True] = event

    found = {}
    for event in said:
        about = event.metric, event.source, event.of_run
        by = latest.get((about, event.kind is Kind.DEMONSTRATION), event)
        if (value := values.get(event.id)) is not None:
            part = rule.weights[event.metric] * value
            found[event.id] = EventFate(Fate.COUNTS, value, _clip(rule, part) if rule.aggregate == "median" else part)
        elif event.id == edit:
            found[event.id] = EventFate(Fate.EDIT_STANDS)
        elif not rewarding(event.kind):
            found[event.id] = EventFate(Fate.COMMENT)
        elif not in_window(rule, sampled_at=sampled_at, received_at=event.received_at):
            found[event.id] = EventFate(Fate.OUT_OF_WINDOW)
        elif event.kind is Kind.RETRACTION:
            found[event.id] = EventFate(Fate.RETRACTION)
        elif by is not event or event.kind is Kind.DEMONSTRATION:
            fate = Fate.RETRACTED if by.kind is Kind.RETRACTION else Fate.REPLACED
            found[event.id] = EventFate(fate, replaced_by=edit if by is event else by.id)
        else:
            unused = rule.run_feedback == "fallback" and event.of_run and event.metric in own
            fate = Fate.RUN_FEEDBACK_UNUSED if unused else Fate.SETTLED
            fate = Fate.UNFINISHED_RUN if _is_of_no_end(rule, event) else fate
            fate = Fate.NO_VALUE if _value(rule, event) is None else fate
            found[event.id] = EventFate(fate if event.metric in rule.weights else Fate.NO_WEIGHT)
    return found


def _is_of_no_end(rule: RewardRule, event: Event) -> bool:
    return event.unfinished and rule.unfinished_runs == "ignore"


def _in_time(rule: RewardRule, events: Iterable[Event], sampled_at: float) -> list[Event]:
    """The events that can count, in their order; a repeat after the window does not move its event."""

    def counts(at: float) -> bool:
        return in_window(rule, sampled_at=sampled_at, received_at=at)

    def place(event: Event) -> tuple[float, int]:
        again = event.repeated_at or event.received_at
        return again if counts(again) else event.received_at, event.id

    found = [event for event in events if rewarding(event.kind) and counts(event.received_at)]
    is_ordered = all(event.repeated_at is None or counts(event.repeated_at) for event in found)
    return found if is_ordered else sorted(found, key=place)


def default_of(rule: RewardRule, *, sampled_at: float) -> Reward | None:
    if rule.default is None or rule.attribution_window is None:
        return None
    return Reward(rule.default, sampled_at + rule.attribution_window)


def parts(rule: RewardRule, counting: Iterable[tuple[Event, float]]) -> dict[tuple[str, bool], float]:
    """What each metric adds to the reward, before this is clipped: of the reply itself, and (True) of its run."""
    by_subject: dict[tuple[str, bool], list[tuple[Event, float]]] = {}
    for event, value in counting:
        by_subject.setdefault((event.metric, event.of_run), []).append((event, value))
    found = {}
    for (metric, of_run), said in by_subject.items():
        weight = rule.weights[metric]
        if rule.aggregate == "mean":
            found[metric, of_run] = weight * fmean(value for _, value in said)
        else:
            words = []
            for event, value in said:
                # Whose word it is: that of its key, or else of its call.
                by_key = (event.source or "").startswith(KEY_SOURCE) or event.call_id is None
                voice = voice_of(event.source or "") if by_key else event.call_id
                words.append((voice, _clip(rule, weight * value), event.weight))
            found[metric, of_run] = median_by_voice(words)
    return found


def _clip(rule: RewardRule, value: float) -> float:
    low, high = rule.clip or (-MAX_REWARD, MAX_REWARD)
    return min(max(value, low), high)


def median_by_voice(values: Iterable[tuple[object, float, float]]) -> float:
    """The weighted median of the voters' values: voters, values and weights above 0. A voter's value is the median of

    its values, weighted likewise, with the largest of their weights. Where what is below and
    what is above weigh the same, it is the mean of the two values between.

    >>> median_by_voice([("eve", -1.0, 1.0), ("eve", -1.0, 1.0), ("ann", 1.0, 1.0), ("bob", 1.0, 1.0)])
    1.0
    >>> median_by_voice([("eve", -1.0, 0.1), ("ann", 1.0, 1.0)])
    1.0
    """
    said: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for voice, value, weight in values:
        said[voice].append((value, weight))
    return _weighted_median((_weighted_median(each), max(weight for _, weight in each)) for each in said.values())


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    ordered = sorted(values)
    half, below = math.fsum(weight for _, weight in ordered) / 2, 0.0
    for place, (value, weight) in enumerate(ordered):
        below += weight
        if math.isclose(below, half):
            return (value + ordered[place + 1][0]) / 2
        if below > half:
            return value
    raise ValueError("the median of nothing")


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
        case Kind.COMMENT | Kind.DEMONSTRATION | Kind.RETRACTION:
            return None


#: Those in quarantine among the raters with these `names`, of any tenant.
_QUARANTINED = select(raters.c.tenant, raters.c.name).where(
    raters.c.state == RaterState.QUARANTINED, is_among(raters.c.name, "names")
)


def without_quarantined(connection: Connection, events: Collection[Any]) -> list[Any]:
    names = {name for _, name in map(rater_of, events)}
    quarantined = {tuple(row) for some in portions(names) for row in connection.execute(_QUARANTINED, {"names": some})}
    return [event for event in events if rater_of(event) not in quarantined]


#: Why a row was dropped whose reply has no end, or never reached its client.
CUT_OFF, RETRIED = "cut_off", "retried"

#: The columns that name a run; each of the `runs`, once.
RUN = tuple(experiences.c[name] for name in ("tenant", "task_id", "run_id"))
OF_RUNS = select(*RUN).where(experiences.c.task_id.is_not(None), is_among(tuple_(*RUN), "runs")).group_by(*RUN)

_WHOLE, _NEWEST = func.coalesce(experiences.c.reason, "") != CUT_OFF, func.max(experiences.c.sampled_at)
_UNFINISHED = OF_RUNS.having(func.coalesce(_NEWEST.filter(_WHOLE), 0) < _NEWEST)


def unfinished_among(connection: Connection, runs: Collection[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Those of the runs whose last call was cut off; if a call has several choices, all of them."""
    return {tuple(run) for few in portions(runs, of=3) for run in connection.execute(_UNFINISHED, {"runs": few})}


#: Characters up to which two texts are compared by characters. Longer ones are by words, as many of them at most.
LONGEST = 4000


def similarities(connection: Connection, edits: Mapping[int, int]) -> dict[int, float]:
    """How alike the reply of each row of `experiences` and the answer of its feedback event are, by the rows' ids."""
    answers: dict[int, str] = {}
    for event in find(connection.execute, select(feedback.c.id, feedback.c.text), feedback.c.id, {*edits.values()}):
        message = message_of(event.text) or {"content": event.text}
        answers[event.id] = _text_of_message(message.get("content"), message.get("tool_calls"))
    found: dict[int, float] = {}
    words = select(experiences.c.id, experiences.c.text, experiences.c.tool_calls)
    for row in find(connection.execute, words, experiences.c.id, edits):
        calls = json.loads(row.tool_calls) if row.tool_calls else None
        found[row.id] = similarity(_text_of_message(row.text, calls), answers[edits[row.id]])
    return found


def similarity(reply: str, answer: str) -> float:
    """From 0, nothing in common, to 1, the same.

    >>> similarity("10", "10"), similarity("on Monday", "on Sunday"), similarity("", "18")
    (1.0, 0.7777777777777778, 0.0)
    """
    if reply == answer:
        return 1.0
    by_words = max(len(reply), len(answer)) > LONGEST
    one, other = (text.split()[:LONGEST] if by_words else text for text in (reply, answer))
    return 1 - _distance(one, other) / (max(len(one), len(other)) or 1)


def _distance(one: Sequence[str], other: Sequence[str]) -> int:
    """The Levenshtein distance by Myers' bits (1999), as Hyyrö (2003) has it: where costs rise and fall."""
    if not one or not other:
        return len(one) + len(other)
    places: dict[str, int] = {}
    for at, unit in enumerate(one):
        places[unit] = places.get(unit, 0) | 1 << at
    every, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    rises, falls, distance = every, 0, len(one)
    for unit in other:
        same = places.get(unit, 0)
        diagonal = (((same & rises) + rises) ^ rises) | same | falls
        right, left = falls | (every & ~(diagonal | rises)), diagonal & rises
        distance += bool(right & last) - bool(left & last)
        right, left = right << 1 | 1, left << 1
        rises, falls = every & (left | ~(diagonal | right)), right & diagonal & every
    return distance


def _text_of_message(content: Any, calls: Any) -> str:
    """A message's text, and the calls of tools in it, without their ids and however their JSON is written."""
    text = content if isinstance(content, str) else json.dumps(content) if content else ""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        said = function if isinstance(function, dict) else {"arguments": call}
        arguments = said.get("arguments")
        try:
            read = json.loads(arguments) if isinstance(arguments, str) else arguments
            written = json.dumps(read, sort_keys=True)
        except (ValueError, RecursionError):
            written = str(arguments)
        text += f"\n{said.get('name')} {written}"
    return text
