"""What becomes of feedback about several choices at once, choice by choice, of what comes before any reply, and of what
is offered again."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, and_, func, literal_column, or_, select, tuple_

from tuneloop.shared.experience import Feedback, Outcome
from tuneloop.shared.ledger.raters.voices import voice_of
from tuneloop.shared.ledger.recording.rewards import TRAJECTORY, RewardRow, in_time_for, newest_corrections
from tuneloop.shared.ledger.storage.schema import experiences, feedback
from tuneloop.shared.ledger.storage.transactions import portions
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
    outcomes = dict(_of_choices(rule, event, rows))
    return outcomes if len(set(outcomes.values())) > 1 else {}


def _of_choices(rule: RewardRule, event: Feedback, rows: Sequence[RewardRow]) -> Iterator[tuple[str, Outcome]]:
    # What the event itself made of a row that it came too late for does not count.
    earlier = (row for row in rows if not (row.correction and row.rewarded_at == event.received_at))
    for row in newest_corrections(earlier):
        outcome = Outcome.ACCEPTED if in_time_for(rule, event, row) else Outcome.LATE
        yield f"{row.msg_id}:{row.choice}", outcome


def equal_texts(read: Read, texts: Collection[tuple[int, str | None]]) -> set[tuple[int, str | None]]:
    """Those of the pairs of a stored event and a text in which it is the event's. Only as long texts are read."""
    lengths = {(row, len(text)) for row, text in texts if text is not None}
    as_long: list[int] = []
    for portion in portions({row for row, _ in lengths}):
        of_rows = select(feedback.c.id, func.length(feedback.c.text)).where(feedback.c.id.in_(portion))
        as_long += [row for row, length in read(of_rows) if (row, length) in lengths]
    found: set[tuple[int, str | None]] = set()
    for portion in portions(as_long):
        of_texts = select(feedback.c.id, feedback.c.text).where(feedback.c.id.in_(portion))
        found |= {(row, text) for row, text in read(of_texts)}
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
        self._choices: dict[str, int] = {}
        self._by_subject: Counter[object] = Counter()
        self._by_voice: Counter[object] = Counter()

    def take(self, event: Any) -> None:
        """Count an event."""
        for thing in _things(event):
            self._by_subject[thing] += 1
            self._by_voice[thing, _voice(event)] += 1

    def allows(self, event: Any) -> bool:
        """Whether there is room for an event."""
        return all(self._has_room(thing, _voice(event)) for thing in _things(event))

    def _has_room(self, thing: object, voice: str) -> bool:
        full = max(self._by_subject[thing] // MAX_SAID, self._by_voice[thing, voice] // MAX_SAID_BY_ONE)
        return not full or (isinstance(thing, str) and full < min(self._choices_of(thing), MAX_CHOICES_SAID))

    def _choices_of(self, msg_id: str) -> int:
        if msg_id not in self._choices:
            first = and_(experiences.c.msg_id == msg_id, experiences.c.correction == 0)
            [(self._choices[msg_id],)] = self._read(select(func.count()).select_from(experiences).where(first))
        return self._choices[msg_id]


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
    there: set[object] = {tuple(row) for few in portions(runs, of=3) for row in read(_runs(few))}
    return there | {
        row.msg_id
        for few in portions(replies)
        for row in read(select(experiences.c.msg_id).distinct().where(experiences.c.msg_id.in_(few)))
    }


def target_of(event: Any) -> object:
    """The reply or run that an event is about."""
    return event.msg_id or _run_of(event)


def _run_of(event: Any) -> tuple[object, ...]:
    return event.tenant, event.task_id, event.run_id


def _runs(names: Sequence[Any]) -> Select[Any]:
    """Which of these runs have replies."""
    run = [experiences.c[name] for name in TRAJECTORY]
    return select(*run).distinct().where(experiences.c.task_id.is_not(None), tuple_(*run).in_(names))


def too_late_for(connection: Connection, msg_ids: Collection[str]) -> set[str]:
    """Those of the replies about which feedback came too late."""
    late = feedback.c.outcome == Outcome.LATE
    found: set[str] = set()
    for portion in portions(msg_ids):
        about = or_(
            feedback.c.msg_id == experiences.c.msg_id,
            feedback.c.other_msg_id == experiences.c.msg_id,
            and_(feedback.c.msg_id.is_(None), *(feedback.c[name] == experiences.c[name] for name in TRAJECTORY)),
        )
        corrected = select(experiences.c.msg_id).where(
            experiences.c.msg_id.in_(portion), select(feedback.c.id).where(late, about).exists()
        )
        found |= set(connection.execute(corrected).scalars())
    return found
