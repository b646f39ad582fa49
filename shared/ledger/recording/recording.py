"""The explorer's verbs: record exchanges and feedback, commit experiences, recompute rewards."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import NamedTuple, TypedDict, Unpack

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Update,
    and_,
    bindparam,
    exists,
    literal_column,
    select,
    update,
)

from tuneloop.shared import steady_time
from tuneloop.shared.experience import Exchange, Feedback, Kind, Outcome, Record, State
from tuneloop.shared.ledger.raters import Rater, voter_of
from tuneloop.shared.ledger.recording.attestation import mark_untrusted
from tuneloop.shared.ledger.recording.new_feedback import (
    EarlyFeedback,
    FeedbackQuota,
    content_of,
    earlier_feedback,
    equal_texts,
    is_repeated,
    name_of,
    outcomes_apart,
    rows_about,
    stored_among,
    subject_of,
    target_of,
    targets_there,
    without_repeats,
)
from tuneloop.shared.ledger.recording.retention import not_erased
from tuneloop.shared.ledger.recording.rewards import (
    RewardRow,
    Rewards,
    Trajectory,
    event_order,
    replies_decided_by,
    replies_of,
    replies_preferred_to,
    write,
)
from tuneloop.shared.ledger.recording.stored_completions import tag
from tuneloop.shared.ledger.storage.rows import exchange_row, experience_row, feedback_row
from tuneloop.shared.ledger.storage.schema import (
    deletions,
    epochs,
    erasures,
    exchanges,
    experiences,
    feedback,
    mismatches,
    new_rater,
    raters,
)
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

_OUTCOMES = select(feedback.c.event_id, feedback.c.call_id, feedback.c.outcome).where(
    is_among(feedback.c.event_id, "events")
)
_RECEIVED = select(feedback.c.received_at).where(is_among(feedback.c.event_id, "events"))
_STORED_REPLIES = select(exchanges.c.msg_id).where(is_among(exchanges.c.msg_id, "names"))
_NEWEST_EPOCH = select(epochs.c.epoch, epochs.c.seen_at).order_by(epochs.c.epoch.desc()).limit(1)


#: Whether there are any rows of kinds that most ledgers have none of, by one query.
_PRESENT: Executable = select(
    *(exists().select_from(table).label(table.name) for table in (deletions, erasures, mismatches)),
    # Feedback that waits for its reply; the second condition has the index used.
    exists().where(literal_column("outcome = 'pending'"), feedback.c.id > 0).label("pending"),
    exists().where(feedback.c.other_msg_id.is_not(None)).label("preferences"),
    exists().where(feedback.c.msg_id.is_(None)).label("of_runs"),
)

#: Whether `its_tenant` has feedback about a reply that waits for it, and whether any reply was preferred to another.
_RATED, _PREFERRED_TO = (
    select(named).where(is_among(named, "replies")) for named in (feedback.c.msg_id, feedback.c.other_msg_id)
)


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


class Recording(LedgerPart):
    """Exchanges and feedback come in, and are committed for training.

    `ticks` are seconds that nobody sets, and that stand still while the machine sleeps.
    """

    def __init__(
        self, transactions: Transactions, rewards: Rewards, *, ticks: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(transactions)
        #: Raises LedgerForbidden if the database's file was deleted or replaced; asks the file system alone.
        self.check_place = transactions.file.check
        self._boot_time = transactions.boot_time
        self._rewards = rewards
        self._voters: set[Rater] = set()
        self._ticks, self._early = ticks, EarlyFeedback(ticks)
        #: What the trainer last wrote, and since when by our own ticks: its clock and ours need not agree.
        self._heartbeat: tuple[object, float] = None, ticks()

    def record(self, records: Sequence[Record], slots: Sequence[object] = ()) -> None:
        """Store exchanges and feedback in their order; what is there already stays as it is.

        `slots` are those that the records were read from, in which they are read again if the process dies.
        """
        from_slots = zip(records, slots, strict=bool(slots))
        slot_of = {name_of(each): slot for each, slot in from_slots if isinstance(each, Feedback)}
        voters: set[Rater] = set()
        with self._write() as connection:
            # What processes took for the time gives way to the ledger's, in records of this start of the machine.
            began, boot = self._boot_time(), steady_time.boot()
            dated = [
                msgspec.structs.replace(each, received_at=began + each.stamp.seconds)
                if began is not None and each.stamp and each.stamp.boot == boot
                else each
                for each in records
            ]
            new_exchanges = [record for record in dated if isinstance(record, Exchange)]
            new_feedback = [record for record in dated if isinstance(record, Feedback)]
            # Else a reply and its feedback, recorded by two processes at once, would not see each other.
            alone(connection, "record", shared=not new_feedback)
            present = connection.execute(_PRESENT).one()
            new_exchanges, new_feedback = not_erased(
                connection, new_exchanges, new_feedback, deletions=present.deletions, erasures=present.erasures
            )
            if present.mismatches:
                new_exchanges = mark_untrusted(connection, new_exchanges)
            choices = [experience_row(each, choice) for each in new_exchanges for choice in each.experiences]
            there = stored_among(connection, _STORED_REPLIES, {each.msg_id for each in new_exchanges})
            put(connection, exchanges, [exchange_row(each) for each in new_exchanges])
            tag(connection, [each for each in new_exchanges if each.msg_id not in there])
            put(connection, experiences, choices)
            new_feedback = self._early.within_bound(connection, new_feedback)
            if changed := without_repeats(connection, new_feedback, slot_of):
                connection.execute(ignoring(connection, feedback), [feedback_row(each) for each in changed])
                sources = {(each.tenant, each.source or "") for each in changed}
                named = (each for each in sources if each not in self._rewards.trusted_raters)
                voters = {(tenant, voter_of(source)) for tenant, source in named} - self._voters
                put(connection, raters, [new_rater(*voter, self._clock()) for voter in voters])
            touched = set(_replies(connection, changed))
            msg_ids = [each.msg_id for each in new_exchanges]
            for wanted, earlier in ((present.pending, _RATED), (present.preferences, _PREFERRED_TO)):
                for portion in portions(msg_ids if wanted else ()):
                    touched.update(connection.execute(earlier, {"replies": portion}).scalars())
            if present.of_runs:
                touched.update(each.msg_id for each in new_exchanges if None not in (each.task_id, each.run_id))
            self._rewards.compute(connection, touched)
        if len(self._voters) > _VOTERS_KNOWN:
            self._voters.clear()
        self._voters |= voters

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
        for row in sorted(earlier_feedback(events, self._read), key=event_order):
            quota.take(row)
            said[subject_of(row), content_of(row)] = row
        names = {event.event_id for event in events}
        stored = {row.event_id for portion in portions(names) for row in self._read(_OUTCOMES, {"events": portion})}
        alike = [(said.get((subject_of(event), content_of(event))), event) for event in events]
        same = equal_texts(self._read, [(row.id, event.text) for row, event in alike if row and row.has_text])
        left = [event for row, event in alike if not (row and is_repeated(row, event, same))]
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
        return outcomes_apart(self._rewards.rule, event, rows)

    def replies_decided_by(self, event: Feedback) -> list[str]:
        """Of the first MAX_TOLD experiences of a run, the replies whose reward an event about the run makes."""
        with self._snapshot() as connection:
            msg_ids = list(dict.fromkeys(row.msg_id for row in connection.execute(rows_about(event))))
            whose = (self._rewards.rule, self._rewards.trusted_raters)
            return list(dict.fromkeys(replies_decided_by(connection, event, msg_ids, *whose)))

    def commit(self, tenant: str, **limits: Unpack[CommitLimits]) -> int:
        """Release the tenant's rewarded experiences to the trainer and return how many."""
        with self._write() as connection:
            now = self._clock()
            given = {f"its_{name}": value for name, value in limits.items() if value is not None}
            names, values = frozenset(given), {**given, "its_tenant": tenant, "now": now}
            rule = self._rewards.rule
            if rule.default is not None and rule.attribution_window is not None:
                # What had no feedback until its window closed.
                recorded = update(experiences).where(experiences.c.state == State.RECORDED, _limited_to(names))
                rewarding = recorded.where(experiences.c.sampled_at < now - rule.attribution_window).values(
                    reward=rule.default,
                    rewarded_at=experiences.c.sampled_at + rule.attribution_window,
                    reward_rule=self._rewards.rule_id(connection),
                    state=State.REWARDED,
                )
                connection.execute(rewarding, values)
            return connection.execute(_committing(names), values).rowcount

    def end_silent_leases(self) -> None:
        """Give back what a trainer holds that has not been heard of for LEASE_S, as long as we have listened."""
        for beat in self._read(_NEWEST_EPOCH):
            if beat != self._heartbeat[0]:
                self._heartbeat = beat, self._ticks()
            if self._ticks() - self._heartbeat[1] > LEASE_S:
                with self._write() as connection:
                    if connection.execute(_NEWEST_EPOCH).one() == beat:
                        self._rewards.release(connection, experiences.c.lease_epoch <= beat.epoch)

    def recompute_rewards(
        self, *, dry_run: bool = False, examined: Callable[[int], object] = lambda count: None
    ) -> RecomputeResult:
        """Recompute the rewards of what is not trained yet from the feedback, under the present rule.

        A transaction for each portion, so that others can write meanwhile; `examined` is called with its size.
        """
        replies = changed = 0
        last = ""
        open_ = experiences.c.state.not_in((State.LEASED, State.TRAINED))
        query = select(experiences.c.msg_id).distinct().where(open_).order_by(experiences.c.msg_id).limit(_PAGE)
        while page := [row.msg_id for row in self._read(query.where(experiences.c.msg_id > last))]:
            with self._write() as connection:
                alone(connection, "record")
                decided = self._rewards.plan(connection, page)
                if not dry_run:
                    rule_id = self._rewards.rule_id(connection)
                    write(connection, decided._replace(repeats=[]), rule_id, repeat=False)
                    # Store that these rewards are the rule's, unchanged ones included.
                    same = and_(experiences.c.msg_id.in_(page), experiences.c.rewarded_at.is_not(None), open_)
                    connection.execute(update(experiences).where(same).values(reward_rule=rule_id))
            replies, changed, last = replies + len(page), changed + len(decided.changes), page[-1]
            examined(len(page))
        return RecomputeResult(replies, changed)


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
