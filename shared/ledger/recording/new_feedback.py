"""Which feedback is stored: not what repeats or is offered again, and no more than there is room for.

Also what became of it for each choice of a reply.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, and_, func, literal_column, or_, select, tuple_

from tuneloop.shared.experience import Feedback, Kind, Outcome
from tuneloop.shared.ledger.raters import voice_of
from tuneloop.shared.ledger.recording.rewards import TRAJECTORY, RewardRow, event_order, in_time_for, newest_corrections
from tuneloop.shared.ledger.storage.schema import experiences, feedback
from tuneloop.shared.ledger.storage.transactions import is_among, portions
from tuneloop.shared.settings.feedback import RewardRule

#: The choices of a reply or trajectory that are told apart.
MAX_TOLD = 1000

#: Feedback events about one reply or run: each later one is reckoned with all of them.
MAX_SAID = 1000
#: How many of them are of one key, or of one source without a key: nobody keeps others from saying anything.
MAX_SAID_BY_ONE = 250
#: A reply of several choices may have so many for each of this many of them.
MAX_CHOICES_SAID = 25

#: Events of a tenant about replies and runs that are not there: not yet, or not to be stored at all.
MAX_EARLY = 100_000
_EARLY_S = 10.0

#: An event's id, and the id of the request that brought it.
EventName = tuple[str, str]

#: What a query finds, in or outside a transaction.
Read = Callable[[Select[Any]], Iterable[Any]]


#: What of an event tells whether a later one repeats it, but for its text, which may be long.
_UNCOMPARED = {"text", "occurred_at", "key"}
_COMPARED = [column for column in feedback.c if column.name not in _UNCOMPARED]

_EARLIER = select(*_COMPARED, feedback.c.text.is_not(None).label("has_text"))
_ABOUT_REPLIES = _EARLIER.where(
    or_(
        is_among(feedback.c.msg_id, "replies"),
        and_(feedback.c.other_msg_id.is_not(None), is_among(feedback.c.other_msg_id, "replies")),
    )
)
_RUN = tuple_(feedback.c.tenant, feedback.c.task_id, feedback.c.run_id)
_ABOUT_RUNS = _EARLIER.where(feedback.c.msg_id.is_(None), is_among(_RUN, "runs"))

_STORED_EVENTS = select(feedback.c.event_id).where(is_among(feedback.c.event_id, "names"))


def rows_about(event: Feedback) -> Select[Any]:
    """The rows of an event that names no single choice, the first MAX_TOLD of them."""
    rows = select(*(experiences.c[name] for name in RewardRow._fields)).where(experiences.c.tenant == event.tenant)
    if event.msg_id is not None:
        rows = rows.where(experiences.c.msg_id == event.msg_id)
    else:
        named = tuple_(*(experiences.c[name] for name in TRAJECTORY))
        run = (event.tenant, event.task_id, event.run_id)
        rows = rows.where(experiences.c.task_id.is_not(None), named.in_([run]))
    return rows.order_by(experiences.c.id).limit(MAX_TOLD)


def outcomes_apart(rule: RewardRule, event: Feedback, rows: Sequence[RewardRow]) -> dict[str, Outcome]:
    """What became of an event for each choice, as `msg_id:choice`; empty if it is the same for all."""
    # What the event itself made of a row that it came too late for does not count.
    earlier = (row for row in rows if not (row.correction and row.rewarded_at == event.received_at))
    outcomes = {
        f"{row.msg_id}:{row.choice}": Outcome.ACCEPTED if in_time_for(rule, event, row) else Outcome.LATE
        for row in newest_corrections(earlier)
    }
    return outcomes if len(set(outcomes.values())) > 1 else {}


def equal_texts(read: Read, texts: Collection[tuple[int, str | None]]) -> set[tuple[int, str | None]]:
    """Those of the pairs of a stored event and a text in which it is the event's."""
    found: set[tuple[int, str | None]] = set()
    for portion in portions({row for row, _ in texts}):
        found |= {
            (row, text) for row, text in read(select(feedback.c.id, feedback.c.text).where(feedback.c.id.in_(portion)))
        }
    return found & set(texts)


def offered_again(
    events: Sequence[Feedback], stored: Collection[EventName], slots: Mapping[EventName, object]
) -> set[EventName]:
    """Those of the events that were offered before, when the process or the database died before we knew of it.

    What a slot holds of one key is stored in its order. So what comes before an event that is stored had its turn, too:
    where it is not there, it said what had been said, or found no room. Taken now it would be the last word.
    """
    found, done = set(), set()
    for event in reversed(events):
        name = name_of(event)
        if (slot := slots.get(name)) is not None:
            queue = slot, event.tenant, event.key
            if name in stored:
                done.add(queue)
            if queue in done:
                found.add(name)
    return found


def name_of(event: Any) -> EventName:
    """An event, as the request that brought it named it."""
    return event.event_id, event.call_id


class FeedbackQuota:
    """How many events each reply or run has, and from whom."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._choices: dict[object, int] = {}
        self._by_subject: Counter[object] = Counter()
        self._by_voice: Counter[object] = Counter()

    def take(self, event: Any) -> None:
        """Count an event."""
        for thing in _things(event):
            self._by_subject[thing] += 1
            self._by_voice[thing, _voice(event)] += 1

    def allows(self, event: Any) -> bool:
        """Whether there is room for an event."""
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
    """The reply or run that an event is about, and the reply that it is preferred to."""
    yield target_of(event)
    if event.other_msg_id is not None:
        yield event.other_msg_id


def _voice(event: Any) -> str:
    return voice_of(event.source or "")


class EarlyFeedback:
    """Holds tenants to MAX_EARLY events about what is not there.

    Names of runs cost nothing to make up, and a client may have its replies not stored.
    """

    def __init__(self, ticks: Callable[[], float]) -> None:
        self._ticks = ticks
        self._counted: dict[str, tuple[int, float]] = {}
        self._since: Counter[str] = Counter()

    def within_bound(self, connection: Connection, events: Sequence[Feedback]) -> list[Feedback]:
        """The events without those for which there is no room."""
        counts = Counter(event.tenant for event in events)
        full = {tenant for tenant, count in counts.items() if self._count(connection, tenant) + count > MAX_EARLY}
        there = targets_there([event for event in events if event.tenant in full], connection.execute)
        room: dict[str, int] = {}
        within = []
        for event in events:
            if event.tenant in full:
                if target_of(event) in there:
                    within.append(event)
                    continue
                if event.tenant not in room:
                    room[event.tenant] = MAX_EARLY - self._count(connection, event.tenant, exactly=True)
                if room[event.tenant] <= 0:
                    continue
                room[event.tenant] -= 1
            self._since[event.tenant] += 1
            within.append(event)
        return within

    def _count(self, connection: Connection, tenant: str, *, exactly: bool = False) -> int:
        """How many there are, as of some seconds ago; what came since was counted as if all of it were early."""
        count, looked_at = self._counted.get(tenant, (0, -math.inf))
        if self._ticks() - looked_at > _EARLY_S or (exactly and self._since[tenant]):
            waiting = and_(literal_column("outcome = 'pending'"), feedback.c.tenant == tenant)
            count = int(
                connection.execute(
                    select(func.count()).select_from(select(feedback.c.id).where(waiting).limit(MAX_EARLY).subquery())
                ).scalar_one()
            )
            self._counted[tenant] = count, self._ticks()
            self._since[tenant] = 0
        return count + self._since[tenant]


def targets_there(events: Collection[Feedback], read: Read) -> set[object]:
    """Which of the replies and runs that these events are about there are."""
    runs = {_run_of(event) for event in events if event.msg_id is None}
    replies = {event.msg_id for event in events if event.msg_id is not None}
    run, reply = [experiences.c[name] for name in TRAJECTORY], experiences.c.msg_id
    of_runs, of_replies = select(*run).distinct().where(experiences.c.task_id.is_not(None)), select(reply).distinct()
    named = (row for few in portions(runs, of=3) for row in read(of_runs.where(tuple_(*run).in_(few))))
    there: set[object] = {tuple(row) for row in named}
    return there | {row.msg_id for few in portions(replies) for row in read(of_replies.where(reply.in_(few)))}


def target_of(event: Any) -> object:
    """The reply or run that an event is about."""
    return event.msg_id or _run_of(event)


def _run_of(event: Any) -> tuple[object, ...]:
    return event.tenant, event.task_id, event.run_id


def stored_among(connection: Connection, among: Select[Any], names: Collection[str]) -> set[str]:
    """Those of the names that are stored: a spool may be read twice."""
    return {name for some in portions(names) for name in connection.execute(among, {"names": some}).scalars()}


def without_repeats(
    connection: Connection, events: Sequence[Feedback], slot_of: Mapping[EventName, object]
) -> list[Feedback]:
    """The events that are not stored, do not repeat the latest one of the same source on the same subject, and fit."""
    last: dict[object, Any] = {}
    quota = FeedbackQuota(connection.execute)
    earlier = earlier_feedback(events, connection.execute)
    again = offered_again(events, {name_of(row) for row in earlier}, slot_of)
    # What a client sends again under its key is not the last word: others may have spoken since.
    stored = stored_among(connection, _STORED_EVENTS, {event.event_id for event in events})
    events = [event for event in events if name_of(event) not in again and event.event_id not in stored]
    for row in sorted(earlier, key=event_order):
        last[subject_of(row)] = row
        quota.take(row)
    alike = ((last[subject_of(event)], event) for event in events if subject_of(event) in last)
    texts = [(row.id, event.text) for row, event in alike if content_of(row) == content_of(event) and row.has_text]
    same = equal_texts(connection.execute, texts)
    new = []
    for event in events:
        before = last.get(subject_of(event))
        if event.event_id in stored or (before is not None and is_repeated(before, event, same)):
            continue
        # Who has said something may take it back, once, whatever others have said since.
        takes_back = event.kind is Kind.RETRACTION and before is not None and before.kind != Kind.RETRACTION
        if takes_back or quota.allows(event):
            quota.take(event)
            last[subject_of(event)] = event
            stored.add(event.event_id)
            new.append(event)
    return new


def earlier_feedback(
    events: Collection[Feedback], read: Callable[[Select[Any], Mapping[str, Any]], Iterable[Any]]
) -> Collection[Any]:
    """The feedback that there is about the replies and runs that these events are about."""
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
    """What an event says, but for its text."""
    return event.kind, event.value, event.other_msg_id, event.other_choice, event.task_id, event.run_id
