"""The explorer's verbs: record exchanges and feedback, commit experiences, recompute rewards."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypedDict, Unpack

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, Update, and_, bindparam, or_, select, tuple_, update

from tuneloop.shared import steady_time
from tuneloop.shared.experience import Exchange, Feedback, Kind, Outcome, Record, State
from tuneloop.shared.ledger.rare_rows import ANY_EARLY, RARE_ROWS, RareRows
from tuneloop.shared.ledger.raters.rater_tables import new_rater, raters
from tuneloop.shared.ledger.raters.voices import Rater, voter_of
from tuneloop.shared.ledger.recording.attestation import mark_untrusted
from tuneloop.shared.ledger.recording.erasures import not_erased
from tuneloop.shared.ledger.recording.outcomes import (
    EarlyFeedback,
    EventName,
    FeedbackQuota,
    equal_texts,
    name_of,
    offered_again,
    outcomes_apart,
    rows_about,
    target_of,
    targets_there,
)
from tuneloop.shared.ledger.recording.rewards import (
    RewardRow,
    Trajectory,
    event_order,
    replies_decided_by,
    replies_of,
    replies_preferred_to,
    with_earlier_feedback,
    write,
)
from tuneloop.shared.ledger.recording.settlement import Settlement
from tuneloop.shared.ledger.recording.tags import tag
from tuneloop.shared.ledger.storage.rows import exchange_row, experience_row, feedback_row
from tuneloop.shared.ledger.storage.schema import epochs, exchanges, experiences, feedback
from tuneloop.shared.ledger.storage.transactions import (
    LedgerPart,
    Transactions,
    alone,
    ignoring,
    is_among,
    portions,
    put,
)

#: Seconds without a heartbeat after which a trainer's leases end. A newer trainer ends them at once.
LEASE_S = 600.0

#: So many voters that are in the ledger are known without a look at it.
_VOTERS_KNOWN = 100_000

#: Replies whose rewards are recomputed in one transaction.
_PAGE = 1000

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

_OUTCOMES = select(feedback.c.event_id, feedback.c.call_id, feedback.c.outcome).where(
    is_among(feedback.c.event_id, "events")
)
_RECEIVED = select(feedback.c.received_at).where(is_among(feedback.c.event_id, "events"))
_STORED_EVENTS = select(feedback.c.event_id).where(is_among(feedback.c.event_id, "names"))
_STORED_REPLIES = select(exchanges.c.msg_id).where(is_among(exchanges.c.msg_id, "names"))
_NEWEST_EPOCH = select(epochs.c.epoch, epochs.c.seen_at).order_by(epochs.c.epoch.desc()).limit(1)


class RecomputeResult(NamedTuple):
    """How many replies a recomputation read, and how many rewards it changed."""

    replies: int
    changed: int


class CommitLimits(TypedDict, total=False):
    """What is committed of a tenant's, if it is not all: of a task, a run, some tasks, or what was sampled by a time.

    `until` is in seconds since 1970.
    """

    task_id: str | None
    run_id: str | None
    task_ids: Sequence[str] | None
    until: float | None


class _Heartbeats:
    """How long the trainer has been silent, by our own `ticks`: its clock and ours need not agree."""

    def __init__(self, ticks: Callable[[], float]) -> None:
        self._ticks = ticks
        self._last: object = None
        self._since = ticks()

    def silent_s(self, beat: object) -> float:
        """The seconds since `beat`, what the trainer last wrote, was first seen here."""
        now = self._ticks()
        if beat != self._last:
            self._last, self._since = beat, now
        return now - self._since


class Recording(LedgerPart):
    """Exchanges and feedback come in, and are committed for training.

    `ticks` are seconds that nobody sets, and that stand still while the machine sleeps.
    """

    def __init__(
        self, transactions: Transactions, settlement: Settlement, *, ticks: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(transactions)
        #: Raises LedgerForbidden if the database's file was deleted or replaced; asks the file system alone.
        self.check_place = transactions.file.check
        self._boot_time = transactions.boot_time
        self._settlement = settlement
        self._voters: set[Rater] = set()
        self._heartbeats, self._early = _Heartbeats(ticks), EarlyFeedback(ticks)

    def record(self, records: Sequence[Record], slots: Sequence[object] = ()) -> None:
        """Store exchanges and feedback in their order; what is there already stays as it is.

        `slots` are those that the records were read from, in which they are read again if the process dies.
        """
        from_slots = zip(records, slots, strict=bool(slots))
        slot_of = {name_of(each): slot for each, slot in from_slots if isinstance(each, Feedback)}
        dated = self._in_ledger_time(records)
        new_exchanges = [record for record in dated if isinstance(record, Exchange)]
        new_feedback = [record for record in dated if isinstance(record, Feedback)]
        voters: set[Rater] = set()
        with self._write() as connection:
            # Else a reply and its feedback, recorded by two processes at once, would not see each other.
            alone(connection, "record", shared=not new_feedback)
            rare = RareRows(*connection.execute(RARE_ROWS).one())
            new_exchanges, new_feedback = not_erased(connection, rare, new_exchanges, new_feedback)
            if rare.mismatches:
                new_exchanges = mark_untrusted(connection, new_exchanges)
            choices = [experience_row(each, choice) for each in new_exchanges for choice in each.experiences]
            there = _stored(connection, _STORED_REPLIES, {each.msg_id for each in new_exchanges})
            put(connection, exchanges, [exchange_row(each) for each in new_exchanges])
            tag(connection, [each for each in new_exchanges if each.msg_id not in there])
            put(connection, experiences, choices)
            new_feedback = self._early.within_bound(connection, new_feedback)
            if changed := _new_feedback(connection, new_feedback, slot_of):
                connection.execute(ignoring(connection, feedback), [feedback_row(each) for each in changed])
                voters = self._new_voters(changed)
                put(connection, raters, [new_rater(*voter, self._clock()) for voter in voters])
            earlier = with_earlier_feedback(connection, rare, new_exchanges)
            self._settlement.settle(connection, earlier | set(_replies(connection, changed)))
        self._voters |= voters

    def _new_voters(self, events: Collection[Feedback]) -> set[Rater]:
        """The voters behind these events that are not known here to be in the ledger."""
        if len(self._voters) > _VOTERS_KNOWN:
            self._voters.clear()
        sources = {(each.tenant, each.source or "") for each in events}
        named = (each for each in sources if each not in self._settlement.trusted_raters)
        return {(tenant, voter_of(source)) for tenant, source in named} - self._voters

    def outcomes(self, call_id: str, event_ids: Collection[str]) -> dict[str, Outcome]:
        """What became of the events of one call, all of which the ledger has been given."""
        found: dict[str, Outcome] = {}
        for portion in portions(event_ids):
            for row in self._read(_OUTCOMES, {"events": portion}):
                found[row.event_id] = Outcome(row.outcome) if row.call_id == call_id else Outcome.DUPLICATE
        return {event_id: found.get(event_id, Outcome.DUPLICATE) for event_id in event_ids}

    def without_room(self, events: Collection[Feedback]) -> set[str]:
        """Those of these events that are not there because their reply or run, voice or tenant has all it may have.

        Not those that are stored, or repeat what is.
        """
        quota, said = FeedbackQuota(self._read), {}
        for row in sorted(_earlier_feedback(events, self._read), key=event_order):
            quota.take(row)
            said[_subject(row), _content(row)] = row
        names = {event.event_id for event in events}
        stored = {row.event_id for portion in portions(names) for row in self._read(_OUTCOMES, {"events": portion})}
        alike = [(said.get((_subject(event), _content(event))), event) for event in events]
        same = equal_texts(self._read, [(row.id, event.text) for row, event in alike if row and row.has_text])
        left = [event for row, event in alike if not (row and _is_repeated(row, event, same))]
        left = [event for event in left if event.event_id not in stored]
        there = targets_there(left, self._read)
        return {event.event_id for event in left if target_of(event) not in there or not quota.allows(event)}

    def outcomes_apart(self, event: Feedback) -> dict[str, Outcome]:
        """What became of a late event for each of several choices, by `msg_id:choice`; empty if all were too late."""
        if event.choice is not None:
            return {}
        rows = [RewardRow(*row) for row in self._read(rows_about(event))]
        # Its process dated it otherwise than the ledger, by whose time rewards are.
        for stored in self._read(_RECEIVED, {"events": [event.event_id]}) if len(rows) > 1 else ():
            event = msgspec.structs.replace(event, received_at=stored.received_at)
        return outcomes_apart(self._settlement.rule, event, rows)

    def replies_decided_by(self, event: Feedback) -> list[str]:
        """Of the first MAX_TOLD experiences of a run, the replies whose reward an event about the run makes."""
        with self._snapshot() as connection:
            msg_ids = list(dict.fromkeys(row.msg_id for row in connection.execute(rows_about(event))))
            whose = (self._settlement.rule, self._settlement.trusted_raters)
            return list(dict.fromkeys(replies_decided_by(connection, event, msg_ids, *whose)))

    def commit(self, tenant: str, **limits: Unpack[CommitLimits]) -> int:
        """Release the tenant's rewarded experiences to the trainer and return how many."""
        with self._write() as connection:
            return self._release(connection, tenant, limits)

    def commit_recorded(self, tenant: str, **limits: Unpack[CommitLimits]) -> int | None:
        """The same while replies of no run may not be recorded yet.

        None, and nothing is released, if one of them may have a reward as soon as it is: it was rated before, or the
        rule rewards what nobody rates.
        """
        if self._settlement.rule.default is not None:
            return None
        with self._write() as connection:
            early = connection.execute(ANY_EARLY, {"its_tenant": tenant}).one()
            return None if any(early) else self._release(connection, tenant, limits)

    def _release(self, connection: Connection, tenant: str, limits: CommitLimits) -> int:
        now = self._clock()
        given = {f"its_{name}": value for name, value in limits.items() if value is not None}
        names, values = frozenset(given), {**given, "its_tenant": tenant, "now": now}
        self._give_default(connection, names, values, now)
        return connection.execute(_committing(names), values).rowcount

    def end_silent_leases(self) -> None:
        """Give back what a trainer holds that has not been heard of for LEASE_S, as long as we have listened."""
        for beat in self._read(_NEWEST_EPOCH):
            if self._heartbeats.silent_s(tuple(beat)) > LEASE_S:
                with self._write() as connection:
                    if connection.execute(_NEWEST_EPOCH).one() == beat:
                        self._settlement.release(connection, experiences.c.lease_epoch <= beat.epoch)

    def recompute_rewards(
        self, *, dry_run: bool = False, examined: Callable[[int], object] = lambda count: None
    ) -> RecomputeResult:
        """Recompute the rewards of what is not trained yet from the feedback, under the present rule.

        A transaction for each portion, so that others can write meanwhile; `examined` is called with its size.
        """
        replies = changed = 0
        last = ""
        while page := self._untrained_after(last):
            with self._write() as connection:
                alone(connection, "record")
                decided = self._settlement.plan(connection, page)
                if not dry_run:
                    rule_id = self._settlement.rule_id(connection)
                    write(connection, decided._replace(repeats=[]), rule_id, repeat=False)
                    # Store that these rewards are the rule's, unchanged ones included.
                    open_ = experiences.c.state.not_in((State.LEASED, State.TRAINED))
                    same = and_(experiences.c.msg_id.in_(page), experiences.c.rewarded_at.is_not(None), open_)
                    connection.execute(update(experiences).where(same).values(reward_rule=rule_id))
            replies, changed, last = replies + len(page), changed + len(decided.changes), page[-1]
            examined(len(page))
        return RecomputeResult(replies, changed)

    def _in_ledger_time(self, records: Sequence[Record]) -> list[Record]:
        """The records, those of this start of the machine with the ledger's time in the place of their process's."""
        began, boot = self._boot_time(), steady_time.boot()
        return [
            msgspec.structs.replace(each, received_at=began + each.stamp.seconds)
            if began is not None and each.stamp and each.stamp.boot == boot
            else each
            for each in records
        ]

    def _untrained_after(self, msg_id: str) -> list[str]:
        untrained = experiences.c.state.in_(
            (State.RECORDED, State.REWARDED, State.COMMITTED, State.DROPPED, State.EXPIRED)
        )
        query = select(experiences.c.msg_id).distinct().where(untrained, experiences.c.msg_id > msg_id)
        return [row[0] for row in self._read(query.order_by(experiences.c.msg_id).limit(_PAGE))]

    def _give_default(
        self, connection: Connection, given: frozenset[str], values: Mapping[str, Any], now: float
    ) -> None:
        """Reward what had no feedback until its attribution window closed, if the rule says so."""
        rule = self._settlement.rule
        if rule.default is None or rule.attribution_window is None:
            return
        wanted = _limited_to(given)
        closed = experiences.c.sampled_at < now - rule.attribution_window
        default = {
            "reward": rule.default,
            "rewarded_at": experiences.c.sampled_at + rule.attribution_window,
            "reward_rule": self._settlement.rule_id(connection),
        }
        recorded = experiences.c.state == State.RECORDED
        rewarding = update(experiences).where(recorded, wanted, closed).values(**default, state=State.REWARDED)
        connection.execute(rewarding, values)


def _limited_to(given: frozenset[str]) -> ColumnElement[bool]:
    """A tenant's rows, as far as the parameters that are given say."""
    limits = {
        "its_task_id": experiences.c.task_id == bindparam("its_task_id"),
        "its_run_id": experiences.c.run_id == bindparam("its_run_id"),
        "its_task_ids": is_among(experiences.c.task_id, "its_task_ids"),
        "its_until": experiences.c.sampled_at <= bindparam("its_until"),
    }
    return and_(experiences.c.tenant == bindparam("its_tenant"), *(limits[name] for name in sorted(given)))


@cache
def _committing(given: frozenset[str]) -> Update:
    rewarded = update(experiences).where(experiences.c.state == State.REWARDED, _limited_to(given))
    return rewarded.values(state=State.COMMITTED, committed_at=bindparam("now"))


def _stored(connection: Connection, among: Select[Any], names: Collection[str]) -> set[str]:
    """Those of the names that are stored: a spool may be read twice."""
    return {name for some in portions(names) for name in connection.execute(among, {"names": some}).scalars()}


def _new_feedback(
    connection: Connection, events: Sequence[Feedback], slot_of: Mapping[EventName, object]
) -> list[Feedback]:
    """The events that are not stored, do not repeat the latest one of the same source on the same subject, and fit."""
    last: dict[object, Any] = {}
    quota = FeedbackQuota(connection.execute)
    earlier = _earlier_feedback(events, connection.execute)
    again = offered_again(events, {name_of(row) for row in earlier}, slot_of)
    # What a client sends again under its key is not the last word: others may have spoken since.
    stored = _stored(connection, _STORED_EVENTS, {event.event_id for event in events})
    events = [event for event in events if name_of(event) not in again and event.event_id not in stored]
    for row in sorted(earlier, key=event_order):
        last[_subject(row)] = row
        quota.take(row)
    alike = ((last[_subject(event)], event) for event in events if _subject(event) in last)
    texts = [(row.id, event.text) for row, event in alike if _content(row) == _content(event) and row.has_text]
    same = equal_texts(connection.execute, texts)
    new = []
    for event in events:
        before = last.get(_subject(event))
        if event.event_id in stored or (before is not None and _is_repeated(before, event, same)):
            continue
        # Who has said something may take it back, once, whatever others have said since.
        takes_back = event.kind is Kind.RETRACTION and before is not None and before.kind != Kind.RETRACTION
        if takes_back or quota.allows(event):
            quota.take(event)
            last[_subject(event)] = event
            stored.add(event.event_id)
            new.append(event)
    return new


def _earlier_feedback(
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


def _is_repeated(before: Any, event: Feedback, same: Collection[tuple[int, str | None]]) -> bool:
    """Whether an event says what the one before it said; `same` are stored events with a text that is theirs."""
    if _content(before) != _content(event):
        return False
    if isinstance(before, Feedback):
        return before.text == event.text
    return (before.id, event.text) in same if before.has_text else event.text is None


def _subject(event: Any) -> object:
    whole_run = (event.task_id, event.run_id) if event.msg_id is None else None
    return event.tenant, event.msg_id, event.choice, whole_run, event.metric, event.source


def _content(event: Any) -> object:
    return event.kind, event.value, event.other_msg_id, event.other_choice, event.task_id, event.run_id


def _replies(connection: Connection, events: Sequence[Feedback]) -> Iterator[str]:
    """The replies that the events bear on."""
    trajectories: set[Trajectory] = set()
    for event in events:
        if event.msg_id is not None:
            yield event.msg_id
        elif event.task_id is not None and event.run_id is not None:
            trajectories.add((event.tenant, event.task_id, event.run_id))
        if event.other_msg_id is not None:
            yield event.other_msg_id
    yield from replies_of(connection, trajectories)
    retracted = {event.msg_id for event in events if event.kind is Kind.RETRACTION and event.msg_id is not None}
    yield from replies_preferred_to(connection, retracted)
