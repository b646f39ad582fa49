"""Which feedback is stored, not what repeats and no more than there is room for; and what became of it."""

import math
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from msgspec import Struct, structs
from sqlalchemy import (
    Connection,
    Select,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    or_,
    select,
    text,
    tuple_,
    update,
)

from tuneloop.shared.experience import Feedback, Kind, Outcome, State, minted_at, voice_of
from tuneloop.shared.ledger.recording.reward_rule import counting_events
from tuneloop.shared.ledger.recording.rewards import (
    OPEN,
    TRAJECTORY,
    Plan,
    RewardRow,
    RowEvents,
    event_order,
    in_time_for,
    newest_corrections,
)
from tuneloop.shared.ledger.storage.database import find, ignoring, is_among, portions
from tuneloop.shared.ledger.storage.schema import experiences, feedback
from tuneloop.shared.settings.feedback import RewardRule

#: Feedback events about one reply or run: each later one is computed with all of them.
MAX_SAID = 1000
#: How many of them are of one key, or of one source without a key: so no rater keeps others out.
MAX_SAID_BY_ONE = 250
#: A reply of several choices may have so many for each of this many of them.
MAX_CHOICES_SAID = 25

#: Events of a tenant about replies and runs that are not there: not yet, or not to be stored at all.
MAX_EARLY = 100_000
_EARLY_S = 10.0

Statement = float | bool | str

#: What a query finds, in or outside a transaction.
Read = Callable[[Select[Any]], Iterable[Any]]


#: The fields of an event by which a later one repeats it, but for its text, which may be long.
_UNCOMPARED = {"text", "occurred_at", "key"}
_COMPARED = [column for column in feedback.c if column.name not in _UNCOMPARED]

_EARLIER = select(
    *_COMPARED,
    feedback.c.text.is_not(None).label("has_text"),
    case((feedback.c.kind == Kind.LABEL, feedback.c.text)).label("text"),
)
_ABOUT_REPLIES = _EARLIER.where(
    or_(
        is_among(feedback.c.msg_id, "replies"),
        and_(feedback.c.other_msg_id.is_not(None), is_among(feedback.c.other_msg_id, "replies")),
    )
)
_RUN = tuple_(feedback.c.tenant, feedback.c.task_id, feedback.c.run_id)
_ABOUT_RUNS = _EARLIER.where(feedback.c.msg_id.is_(None), is_among(_RUN, "runs"))

_STORED_EVENTS = select(feedback.c.event_id, feedback.c.call_id, feedback.c.outcome).where(
    is_among(feedback.c.event_id, "names")
)
_SAID_AGAIN = (
    update(feedback)
    .where(feedback.c.event_id == bindparam("its_event_id"))
    .values(repeated_at=bindparam("its_repeated_at"))
)


class TakenFeedback(NamedTuple):
    """Events that are stored, count later now, or found no room; those known; what each replaced."""

    new: dict[str, Feedback]
    moved: list[Any]
    full: set[str]
    known: Mapping[str, Any]
    replaced: Mapping[str, "Statement"]


def equal_texts(read: Read, texts: Collection[tuple[int, str | None]]) -> set[tuple[int, str | None]]:
    """Those of the pairs of a stored event and a text in which it is the event's."""
    found = find(read, select(feedback.c.id, feedback.c.text), feedback.c.id, {row for row, _ in texts})
    return {(row.id, row.text) for row in found} & set(texts)


class FeedbackQuota:
    def __init__(self, read: Read) -> None:
        self._read = read
        self._choices: dict[object, int] = {}
        self._by_subject: Counter[object] = Counter()
        self._by_voice: Counter[object] = Counter()

    def take(self, event: Any) -> None:
        for thing in _things(event):
            self._by_subject[thing] += 1
            self._by_voice[thing, _voice(event)] += 1

    def allows(self, event: Any) -> bool:
        for thing in _things(event):
            of_voice = self._by_voice[thing, _voice(event)]
            full = max(self._by_subject[thing] // MAX_SAID, of_voice // MAX_SAID_BY_ONE)
            if full and isinstance(thing, str) and thing not in self._choices:
                first = and_(experiences.c.msg_id == thing, experiences.c.correction == 0)
                [(self._choices[thing],)] = self._read(select(func.count()).select_from(experiences).where(first))
            if full >= max(1, min(self._choices.get(thing, 0), MAX_CHOICES_SAID)):
                return False
        return True


def _things(event: Any) -> Iterator[object]:
    yield target_of(event)
    if event.other_msg_id is not None:
        yield event.other_msg_id


def _voice(event: Any) -> str:
    return voice_of(event.source or "")


class EarlyFeedback:
    """Limits a tenant to MAX_EARLY events about unknown replies; no key takes more than it leaves to others."""

    def __init__(self, ticks: Callable[[], float]) -> None:
        self._ticks = ticks
        self._counted: dict[str, tuple[Counter[str | None], float]] = {}
        self._since: Counter[str] = Counter()

    def within_bound(self, connection: Connection, events: Sequence[Feedback]) -> list[Feedback]:
        offered = Counter(event.tenant for event in events)
        # Below the half, no key can have more than are left.
        looked_at = {
            tenant
            for tenant, count in offered.items()
            if self._count(connection, tenant).total() + self._since[tenant] + count > MAX_EARLY // 2
        }
        there = targets_there([event for event in events if event.tenant in looked_at], connection.execute)
        left: dict[str, int] = {}
        within = []
        for event in events:
            if event.tenant not in looked_at:
                self._since[event.tenant] += 1
            elif target_of(event) not in there:
                early = self._count(connection, event.tenant, exactly=True)
                free = left.setdefault(event.tenant, MAX_EARLY - early.total())
                key = event.key or None
                if free <= (0 if key is None else early[key]):
                    continue
                left[event.tenant] -= 1
                early[key] += 1
            within.append(event)
        return within

    def _count(self, connection: Connection, tenant: str, *, exactly: bool = False) -> Counter[str | None]:
        """How many there are of each key, as of some seconds ago; of those since, all that may be early are counted."""
        early, looked_at = self._counted.get(tenant, (Counter(), -math.inf))
        if self._ticks() - looked_at > _EARLY_S or (exactly and self._since[tenant]):
            waiting = and_(literal_column("outcome = 'pending'"), feedback.c.tenant == tenant)
            rows = connection.execute(select(feedback.c.key, func.count()).where(waiting).group_by(feedback.c.key))
            early = Counter({key: count for key, count in rows})
            self._counted[tenant] = early, self._ticks()
            self._since[tenant] = 0
        return early


def targets_there(events: Collection[Feedback], read: Read) -> set[object]:
    runs = {_run_of(event) for event in events if event.msg_id is None}
    replies = {event.msg_id for event in events if event.msg_id is not None}
    run, reply = [experiences.c[name] for name in TRAJECTORY], experiences.c.msg_id
    of_runs, of_replies = select(*run).distinct().where(experiences.c.task_id.is_not(None)), select(reply).distinct()
    there: set[object] = {tuple(row) for row in find(read, of_runs, tuple_(*run), runs, of=3)}
    return there | {row.msg_id for row in find(read, of_replies, reply, replies)}


def target_of(event: Any) -> object:
    return event.msg_id or _run_of(event)


def _run_of(event: Any) -> tuple[object, ...]:
    return event.tenant, event.task_id, event.run_id


def store_feedback(connection: Connection, events: Sequence[Feedback], *, names: Collection[str]) -> TakenFeedback:
    """Store the events that are new, say something else than their source before, and fit; note repetitions."""
    quota = FeedbackQuota(connection.execute)
    # When each subject's events were said, first and last: times, and beside them the events.
    times, said = defaultdict[object, list[float]](list), defaultdict[object, list[Any]](list)
    latest: dict[object, tuple[float, int]] = {}
    earlier = [(row.received_at, row.id, row) for row in earlier_feedback(events, connection.execute)]
    earlier += [(row.repeated_at, row.id, row) for _, _, row in earlier if row.repeated_at is not None]
    for at, id_, row in sorted(earlier, key=lambda each: each[:2]):
        times[subject_of(row)].append(at)
        said[subject_of(row)].append(row)
        latest.update(dict.fromkeys(_things(row), (at, id_)))
        if at == row.received_at:
            quota.take(row)

    def place_of(event: Feedback) -> int:
        """Behind all that was said of its subject until then."""
        return bisect(times[subject_of(event)], event.received_at)

    # What a client sends again under its key is not the last event: others may have given feedback since.
    known = {
        row.event_id: row for some in portions(names) for row in connection.execute(_STORED_EVENTS, {"names": some})
    }
    alike = [(said[subject_of(event)][place - 1], event) for event in events if (place := place_of(event))]
    texts = [(row.id, event.text) for row, event in alike if content_of(row) == content_of(event) and row.has_text]
    same = equal_texts(connection.execute, texts)
    new: dict[str, Feedback] = {}
    again: dict[str, tuple[Any, float]] = {}
    full = set[str]()
    replaced: dict[str, Statement] = {}
    for event in events:
        subject, place = subject_of(event), place_of(event)
        before = said[subject][place - 1] if place else None
        if event.event_id in known or event.event_id in new:
            continue
        if before is not None and is_repeated(before, event, same):
            was = again.get(before.event_id, (before, getattr(before, "repeated_at", None) or before.received_at))[1]
            if event.received_at <= was:
                continue
            again[before.event_id] = before, event.received_at
        # Who has said something may take it back, once, whatever others have said since.
        elif (event.kind is Kind.RETRACTION and before is not None and before.kind != Kind.RETRACTION) or quota.allows(
            event
        ):
            quota.take(event)
            if before is not None and before.kind != Kind.RETRACTION and place == len(times[subject]):
                replaced[event.event_id] = _statement_of(before)
            before = new[event.event_id] = event
        else:
            full.add(event.event_id)
            continue
        times[subject].insert(place, event.received_at)
        said[subject].insert(place, before)
    if new:
        rows = [{**_row(each), "repeated_at": again.get(id_, (each, None))[1]} for id_, each in new.items()]
        connection.execute(ignoring(connection, feedback), rows)
    old = {id_: row for id_, (row, _) in again.items() if id_ not in new}
    if old:
        moves = [{"its_event_id": id_, "its_repeated_at": again[id_][1]} for id_ in old]
        connection.execute(_SAID_AGAIN, moves)
    moved = [row for row in old.values() if any(latest[thing] > event_order(row) for thing in _things(row))]
    return TakenFeedback(new, moved, full, known, replaced)


def _statement_of(event: Any) -> Statement:
    match event.kind:
        case Kind.NUMBER:
            return float(event.value)
        case Kind.BOOLEAN:
            return bool(event.value)
        case Kind.LABEL:
            return str(event.text)
    return str(event.kind)


def _row(event: Feedback) -> Mapping[str, object]:
    row = structs.asdict(event)
    del row["stamp"]
    return row | {"outcome": Outcome.PENDING, "key": event.key or None}


def earlier_feedback(
    events: Collection[Feedback], read: Callable[[Select[Any], Mapping[str, Any]], Iterable[Any]]
) -> Collection[Any]:
    found: dict[int, Any] = {}
    replies = {event.msg_id for event in events} | {event.other_msg_id for event in events}
    for portion in portions(replies - {None}):
        found |= {row.id: row for row in read(_ABOUT_REPLIES, {"replies": portion})}
    runs = {(event.tenant, event.task_id, event.run_id) for event in events if event.msg_id is None}
    for few in portions(runs, of=3):
        found |= {row.id: row for row in read(_ABOUT_RUNS, {"runs": few})}
    return found.values()


def is_repeated(before: Any, event: Feedback, same: Collection[tuple[int, str | None]]) -> bool:
    """Whether an event says what the one before it said; `same` are stored events with a text that is theirs."""
    if content_of(before) != content_of(event):
        return False
    if isinstance(before, Feedback):
        return before.text == event.text
    return (before.id, event.text) in same if before.has_text else event.text is None


def subject_of(event: Any) -> object:
    """What two events of one source must agree in for the later one to replace the other."""
    whole_run = (event.task_id, event.run_id) if event.msg_id is None else None
    return event.tenant, event.msg_id, event.choice, whole_run, event.metric, event.source


def content_of(event: Any) -> object:
    return event.kind, event.value, event.other_msg_id, event.other_choice, event.task_id, event.run_id


#: The choices of a reply or run that are distinguished.
MAX_TOLD = 1000

#: Late events of a group whose choices are distinguished, and events about runs whose replies are listed.
_MOST_APART = _MOST_OF_RUNS = 100

#: Of the replies of a larger group it is not said whether they will be trained on.
_MAX_EXPLAINED = 1000

#: What a rule makes numbers of, if their metrics have a weight.
RATINGS = frozenset({Kind.NUMBER, Kind.BOOLEAN, Kind.LABEL, Kind.PREFERENCE})

_IS_DROPPED = and_(experiences.c.state == State.DROPPED, experiences.c.correction == 0)
_IS_UNFIT = and_(text("unsampled IS NOT NULL"), experiences.c.state.not_in((State.TRAINED, State.EXPIRED)))
_WHY = select(
    experiences.c.msg_id,
    experiences.c.choice,
    func.coalesce(experiences.c.reason, experiences.c.unsampled).label("why"),
).where(is_among(experiences.c.msg_id, "replies"))
_DROPPED, _DROPPED_OR_UNFIT = _WHY.where(_IS_DROPPED), _WHY.where(or_(_IS_DROPPED, _IS_UNFIT))


class FeedbackResults(Struct, frozen=True):
    """Outcomes of events by their ids; `apart`: by choice, for a late event whose choices differ.

    `not_trained`: why replies are not trained on, by msg_id and choice. `of_runs`: replies whose reward comes from an
    event about their run. `replaced`: the source's earlier value. `unfinished`: events about runs without a reward, as
    the last call was cut off. `of_calls`: outcomes, by call_id, of events whose id another call used.
    """

    outcomes: dict[str, Outcome] = {}
    apart: dict[str, dict[str, Outcome]] = {}
    not_trained: dict[str, dict[int, str]] = {}
    of_runs: dict[str, list[str]] = {}
    replaced: dict[str, Statement] = {}
    unfinished: dict[str, bool] = {}
    of_calls: dict[str, dict[str, Outcome]] = {}

    def of(self, events: Sequence[Feedback]) -> "FeedbackResults":
        found, replies = FeedbackResults(), {event.msg_id for event in events}
        for event in events:
            if (id_ := event.event_id) in self.outcomes:
                found.outcomes[id_] = self.of_calls.get(event.call_id, {}).get(id_, self.outcomes[id_])
        for name in ("apart", "of_runs", "replaced", "unfinished"):
            getattr(found, name).update(
                (id_, each) for id_, each in getattr(self, name).items() if id_ in found.outcomes
            )
        found.not_trained.update((name, each) for name, each in self.not_trained.items() if name in replies)
        return found


_Rows = defaultdict[object, list[tuple[RewardRow, RowEvents]]]


def rated_runs(events: Sequence[Feedback]) -> list[Feedback]:
    of_runs = (each for each in events if each.msg_id is None and each.kind in RATINGS)
    return list(islice(of_runs, _MOST_OF_RUNS))


def results_of(
    connection: Connection,
    events: Sequence[Feedback],
    taken: TakenFeedback,
    decided: Plan,
    rule: RewardRule,
    *,
    dropped: Mapping[str, Outcome],
    restored_at: float | None,
    any_reply: bool,
) -> FeedbackResults:
    """What became of events by this plan, but for those `dropped` first, in a ledger that was `restored_at` a time."""
    results = FeedbackResults()
    if not events:
        return results
    for event, outcome in zip(events, _outcomes(events, taken, decided, dropped, restored_at or 0.0), strict=True):
        if results.outcomes.setdefault(event.event_id, outcome) is not outcome:
            results.of_calls.setdefault(event.call_id, {})[event.event_id] = outcome
    results.replaced.update(
        (id_, said) for id_, said in taken.replaced.items() if results.outcomes[id_] != Outcome.LATE
    )
    rows: _Rows = defaultdict(list)
    for found, heard in decided.read:
        for row in found:
            rows[row.tenant, row.msg_id].append((row, heard))
            rows[row.tenant, row.task_id, row.run_id].append((row, heard))
    late = (each for each in taken.new.values() if each.choice is None and results.outcomes[each.event_id] == "late")
    for event in islice(late, _MOST_APART):
        about = (event.tenant, event.msg_id) if event.msg_id else (event.tenant, event.task_id, event.run_id)
        choices = {
            f"{row.msg_id}:{row.choice}": Outcome.ACCEPTED if in_time_for(rule, event, row) else Outcome.LATE
            for row in newest_corrections(row for row, _ in rows[about][:MAX_TOLD])
        }
        if len({*choices.values()}) > 1:
            results.apart[event.event_id] = choices
    told_runs = [each for each in rated_runs(events) if results.outcomes[each.event_id] is not Outcome.PENDING]
    results.of_runs.update(_replies_decided_by(told_runs, rows, rule))
    for event in told_runs if rule.unfinished_runs == "ignore" else ():
        run = event.tenant, event.task_id, event.run_id
        if any(run in heard.unfinished for _, heard in rows[run]):
            results.unfinished[event.event_id] = True
    there = {each.msg_id for each in events if results.outcomes[each.event_id] is not Outcome.PENDING} - {None}
    for portion in portions(there if len(there) <= _MAX_EXPLAINED else ()):
        for why in connection.execute(_DROPPED if any_reply else _DROPPED_OR_UNFIT, {"replies": portion}):
            results.not_trained.setdefault(why.msg_id, {})[why.choice] = why.why
    return results


def _replies_decided_by(events: Sequence[Feedback], rows: _Rows, rule: RewardRule) -> Iterator[tuple[str, list[str]]]:
    """The replies whose reward each of these events makes, alone or with others."""
    counting: dict[int, set[object]] = {}
    for event in events:
        made: dict[str, None] = {}
        for row, heard in rows[event.tenant, event.task_id, event.run_id][:MAX_TOLD]:
            if row.id not in counting:
                reached = row.state in OPEN and row.state != State.DROPPED  # of those nothing is learnt
                said = counting_events(rule, heard.about(row), sampled_at=row.sampled_at) if reached else ()
                counting[row.id] = {(each.metric, each.source) for each, _ in said if each.of_run}
            if (event.metric, event.source) in counting[row.id]:
                made[row.msg_id] = None
        yield event.event_id, list(made)


def _outcomes(
    events: Sequence[Feedback],
    taken: TakenFeedback,
    decided: Plan,
    dropped: Mapping[str, Outcome],
    restored_at: float,
) -> Iterator[Outcome]:
    there: dict[str, Any] = {}
    for _, heard in decided.read:
        there |= {each.event_id: decided.outcomes.get(each.id, each.outcome) for each in heard.all}
    for event in events:
        id_ = event.event_id
        stored = taken.new.get(id_) or taken.known.get(id_)
        if stored is None:
            yield Outcome.FULL if id_ in taken.full else dropped.get(id_, Outcome.DUPLICATE)
        elif stored.call_id != event.call_id:
            yield Outcome.DUPLICATE
        else:
            outcome = Outcome(there.get(id_, getattr(stored, "outcome", Outcome.PENDING)))
            with suppress(ValueError):
                # It waits in vain: a restored backup does not have its reply.
                if outcome is Outcome.PENDING and event.msg_id and minted_at(event.msg_id) < restored_at:
                    outcome = Outcome.UNKNOWN
            yield outcome
