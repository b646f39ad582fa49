"""The explorer's verbs: record what was said and heard, commit it, and reckon its rewards anew."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, and_, select, true, tuple_, update

from tuneloop.shared.experience import HELD_OUT, Exchange, Experience, Feedback, Kind, Outcome, Record, State
from tuneloop.shared.ledger.recording.erasures import not_erased
from tuneloop.shared.ledger.recording.rewards import (
    Trajectory,
    outdone_by,
    plan,
    replies_of,
    with_earlier_feedback,
    write,
)
from tuneloop.shared.ledger.recording.settlement import Settlement
from tuneloop.shared.ledger.recording.tags import tag
from tuneloop.shared.ledger.storage.rows import exchange_row, experience_row, feedback_row
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback, mismatches
from tuneloop.shared.ledger.storage.transactions import LedgerPart, Transactions, alone, ignoring, portions, put

#: Replies whose rewards are reckoned anew in one transaction.
_PAGE = 1000


class Recomputed(NamedTuple):
    """What reckoning anew came to."""

    replies: int
    changed: int


class Recording(LedgerPart):
    """Exchanges and feedback come in, and are committed for training."""

    def __init__(self, transactions: Transactions, settlement: Settlement) -> None:
        super().__init__(transactions)
        self._settlement = settlement

    def record(self, records: Sequence[Record]) -> None:
        """Store exchanges and feedback in their order; what is there already stays as it is."""
        said = [record for record in records if isinstance(record, Exchange)]
        heard = [record for record in records if isinstance(record, Feedback)]
        with self._write() as connection:
            # Else a reply and its feedback, recorded by two processes at once, would not see each other.
            alone(connection, "record", shared=not heard)
            said, heard = not_erased(connection, said, heard)
            said = trustworthy(connection, said)
            rows = [experience_row(each, choice) for each in said for choice in each.experiences]
            put(connection, exchanges, [exchange_row(each) for each in said])
            tag(connection, said)
            put(connection, experiences, rows)
            if news := _news(connection, heard):
                connection.execute(ignoring(connection, feedback), [feedback_row(each) for each in news])
            self._settlement.settle(
                connection, with_earlier_feedback(connection, said) | set(_replies(connection, news))
            )

    def outcomes(self, call_id: str, event_ids: Collection[str]) -> dict[str, Outcome]:
        """What became of the events of one call, all of which the ledger has been given."""
        found: dict[str, Outcome] = {}
        for portion in portions(event_ids):
            query = select(feedback.c.event_id, feedback.c.call_id, feedback.c.outcome)
            for row in self._read(query.where(feedback.c.event_id.in_(portion))):
                found[row.event_id] = Outcome(row.outcome) if row.call_id == call_id else Outcome.DUPLICATE
        return {event_id: found.get(event_id, Outcome.DUPLICATE) for event_id in event_ids}

    def commit(
        self,
        tenant: str,
        *,
        task_id: str | None = None,
        run_id: str | None = None,
        until: float | None = None,
    ) -> int:
        """Release the tenant's rewarded experiences to the trainer and return how many.

        `until` (seconds since 1970) leaves out what was sampled later. Leases that have run out end here too.
        """
        now = self._clock()
        wanted = and_(
            experiences.c.tenant == tenant,
            experiences.c.task_id == task_id if task_id is not None else true(),
            experiences.c.run_id == run_id if run_id is not None else true(),
            experiences.c.sampled_at <= until if until is not None else true(),
        )
        with self._write() as connection:
            self._give_default(connection, wanted, now)
            done = connection.execute(
                update(experiences)
                .where(experiences.c.state == State.REWARDED, wanted)
                .values(state=State.COMMITTED, committed_at=now)
            )
            self._settlement.release(connection, experiences.c.lease_until < now)
            return done.rowcount

    def recompute_rewards(self, *, dry_run: bool = False) -> Recomputed:
        """Reckon the rewards of what is not trained yet anew from the feedback, under the rule of now."""
        replies = changed = 0
        last = ""
        while page := self._untrained_after(last):
            with self._write() as connection:
                alone(connection, "record")
                decided = plan(connection, page, self._settlement.rule, now=self._clock())
                if not dry_run:
                    rule_id = self._settlement.rule_id(connection)
                    write(connection, decided._replace(repeats=[]), rule_id, repeat=False)
                    _under_the_rule(connection, page, rule_id)
            replies, changed, last = replies + len(page), changed + len(decided.changes), page[-1]
        return Recomputed(replies, changed)

    def _untrained_after(self, msg_id: str) -> list[str]:
        untrained = experiences.c.state.in_(
            (State.RECORDED, State.REWARDED, State.COMMITTED, State.DROPPED, State.EXPIRED)
        )
        query = select(experiences.c.msg_id).distinct().where(untrained, experiences.c.msg_id > msg_id)
        return [row[0] for row in self._read(query.order_by(experiences.c.msg_id).limit(_PAGE))]

    def _give_default(self, connection: Connection, wanted: Any, now: float) -> None:
        """Reward what had no feedback until its attribution window closed, if the rule says so."""
        rule = self._settlement.rule
        if rule.default is None or rule.attribution_window is None:
            return
        closed = experiences.c.sampled_at < now - rule.attribution_window
        default = {
            "reward": rule.default,
            "rewarded_at": experiences.c.sampled_at + rule.attribution_window,
            "reward_rule": self._settlement.rule_id(connection),
        }
        recorded = experiences.c.state == State.RECORDED
        connection.execute(update(experiences).where(recorded, wanted, closed).values(**default, state=State.REWARDED))
        # Else those that somebody said something of would pass for all of them.
        unrewarded = and_(experiences.c.state == State.DROPPED, experiences.c.reward.is_(None))
        held_out = experiences.c.reason == HELD_OUT
        connection.execute(update(experiences).where(unrewarded, held_out, wanted, closed).values(default))


def _news(connection: Connection, heard: Sequence[Feedback]) -> list[Feedback]:
    """The events that do not merely say again what the same source last said of the same thing."""
    last: dict[object, object] = {}
    msg_ids = {event.msg_id for event in heard if event.msg_id is not None}
    trajectories = {(event.tenant, event.task_id, event.run_id) for event in heard if event.msg_id is None}
    for row in sorted(_said_before(connection, msg_ids, trajectories), key=lambda row: (row.received_at, row.id)):
        last[_thing(row)] = _content(row)
    news = []
    for event in heard:
        if last.get(_thing(event)) != _content(event):
            last[_thing(event)] = _content(event)
            news.append(event)
    return news


def _said_before(connection: Connection, msg_ids: Collection[str], trajectories: Collection[Any]) -> Iterator[Any]:
    for portion in portions(msg_ids):
        yield from connection.execute(select(feedback).where(feedback.c.msg_id.in_(portion)))
    named = tuple_(feedback.c.tenant, feedback.c.task_id, feedback.c.run_id)
    for few in portions(trajectories, of=3):
        yield from connection.execute(select(feedback).where(feedback.c.msg_id.is_(None), named.in_(few)))


def _thing(event: Any) -> object:
    whole_run = (event.task_id, event.run_id) if event.msg_id is None else None
    return event.tenant, event.msg_id, event.choice, whole_run, event.metric, event.source


def _content(event: Any) -> object:
    return event.kind, event.value, event.text, event.other_msg_id, event.other_choice, event.task_id, event.run_id


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
    yield from outdone_by(connection, retracted)


def _under_the_rule(connection: Connection, msg_ids: Sequence[str], rule_id: int) -> None:
    """Say that these rewards are the rule's, those too that it left as they were."""
    open_ = experiences.c.state.not_in((State.LEASED, State.TRAINED))
    same = and_(experiences.c.msg_id.in_(msg_ids), experiences.c.reward.is_not(None), open_)
    connection.execute(update(experiences).where(same).values(reward_rule=rule_id))


#: Why what such an engine sampled is not trained on.
REASON = "engine_mismatch"


def trustworthy(connection: Connection, said: Sequence[Exchange]) -> list[Exchange]:
    """The exchanges, those marked that an engine answered when it was not what it should have been."""
    known = connection.execute(select(mismatches.c.engine, mismatches.c.since, mismatches.c.until)).all()
    if not known:
        return list(said)
    return [_marked(each) if any(_within(each, row) for row in known) else each for each in said]


def _within(exchange: Exchange, row: Any) -> bool:
    same: bool = exchange.engine == row.engine
    return same and exchange.received_at < row.until and exchange.received_at + exchange.latency_s >= row.since


def _marked(exchange: Exchange) -> Exchange:
    return msgspec.structs.replace(exchange, experiences=tuple(map(_dropped, exchange.experiences)))


def _dropped(experience: Experience) -> Experience:
    known = experience.drop_reason if experience.drop_reason != HELD_OUT else None
    return msgspec.structs.replace(experience, drop_reason=known or REASON)
