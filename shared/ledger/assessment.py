"""The verbs about raters: compare them with each other, put one into quarantine, let one out again.

A rater in quarantine is heard no more: what it said is kept, and what comes is stored, but rewards, pairs and edited
answers are made without it; those that are not trained on yet are made anew at once, also after a crash in between.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, and_, bindparam, delete, func, insert, select, tuple_, update

from tuneloop.shared.errors import UnknownRater
from tuneloop.shared.experience import Kind
from tuneloop.shared.ledger.raters.newest_feedback import KeyWithFeedback, keys_with_feedback, newest_rated_of_key
from tuneloop.shared.ledger.raters.rater_tables import RaterState, rater_events, raters
from tuneloop.shared.ledger.raters.reliability import (
    KNOWN,
    Rater,
    RaterFigures,
    RaterVerdict,
    figures,
    weight_of,
)
from tuneloop.shared.ledger.raters.standing import rater_of
from tuneloop.shared.ledger.recording.reward_rule import Event, is_clipped, worth
from tuneloop.shared.ledger.recording.rewards import replies_of
from tuneloop.shared.ledger.recording.settlement import Settlement
from tuneloop.shared.ledger.storage.schema import feedback
from tuneloop.shared.ledger.storage.transactions import LedgerPart, Transactions, alone, put
from tuneloop.shared.settings.feedback import FeedbackSettings, RewardRule

#: The newest events of a tenant that its raters are compared by, and so many of one rater at most.
WINDOW, OF_ONE = 5000, 500

#: When so many events have been read, the other tenants wait for the next turn: they are first then.
AT_ONCE = 20_000

#: As how many events a key counts there, whatever it said: it is asked for by itself.
_KEY_COST = 10

#: The keys of a tenant that are looked at: those that spoke last, and what has no key, which the judge is a part of.
_MOST_KEYS = 500

#: A rater is an outlier with so many numbers that are clipped, if they are this part of its own and few of the others'.
EXTREME_LEAST, EXTREME_SHARE, EXTREME_OF_OTHERS = 10, 0.2, 0.05

#: The same with so many events about one reply under one metric, if they are half of its own.
ON_ONE_REPLY = 20

#: Replies whose rewards are made anew in one transaction.
_PAGE = 100

#: Who decides by himself.
BY = "tuneloop"

#: Raters whose figures are written in one transaction.
_WRITTEN = 200

_FIGURES = ("reliability", "compared", "events", "extreme")
_NEW_FIGURES = (
    update(raters)
    .where(raters.c.tenant == bindparam("its_tenant"), raters.c.name == bindparam("its_name"))
    .values({name: bindparam(f"its_{name}") for name in (*_FIGURES, "updated_at")})
)

_T = TypeVar("_T")


class RaterStanding(NamedTuple):
    """A row of `raters`; `events` and `extreme` are among the newest WINDOW events of the tenant."""

    tenant: str
    name: str
    state: RaterState
    reliability: float
    compared: int
    events: int
    extreme: int
    released: bool
    reason: str | None
    updated_at: float

    @property
    def weight(self) -> float:
        """How much its word counts among others'."""
        return 0.0 if self.state is RaterState.QUARANTINED else weight_of(self.reliability, self.compared)


class RaterDecision(NamedTuple):
    """What was decided about a rater."""

    tenant: str
    name: str
    at: float
    state: RaterState
    actor: str
    reason: str


class _Activity(NamedTuple):
    """What one rater did in the window.

    Its events, its numbers, those of them that are clipped, and the most events about one reply under one metric.
    """

    events: int
    numbers: int
    extreme: int
    on_one: int


class Raters(LedgerPart):
    """Who gives feedback, and whose counts."""

    def __init__(self, transactions: Transactions, settlement: Settlement) -> None:
        super().__init__(transactions)
        self._settlement = settlement
        #: By tenant, the newest event when its raters were last compared; who waits longest comes first.
        self._seen: dict[str, int] = {}
        #: The newest event of all when no tenant was left to be compared.
        self._compared: int | None = None

    def all(self) -> list[RaterStanding]:
        """All raters, those in quarantine first."""
        query = select(*(raters.c[name] for name in RaterStanding._fields))
        rows = self._read(query.order_by(raters.c.state.desc(), raters.c.tenant, raters.c.name))
        return [RaterStanding(*row)._replace(state=RaterState(row.state)) for row in rows]

    def decisions(self) -> list[RaterDecision]:
        """What was decided, the oldest first."""
        query = select(*(rater_events.c[name] for name in RaterDecision._fields)).order_by(rater_events.c.id)
        return [RaterDecision(*row)._replace(state=RaterState(row.state)) for row in self._read(query)]

    def assess(self, options: FeedbackSettings, *, trusted: Container[Rater] = ()) -> list[RaterDecision]:
        """Compare the raters of tenants with new feedback; outliers go into quarantine. Says which did."""
        decided: list[RaterDecision] = []
        newest = self._read(select(func.max(feedback.c.id)))[0][0]
        waiting = deque(self._tenants_to_compare() if newest != self._compared else ())
        read = 0
        while waiting and read < AT_ONCE:
            tenant, keys = waiting.popleft()
            events = self._window(keys)
            decided += self._assess(tenant, events, options, trusted)
            read += len(events) + _KEY_COST * len(keys)
            self._seen.pop(tenant, None)
            self._seen[tenant] = _newest(keys)
        if not waiting:
            self._compared = newest
        self._settle()
        return decided

    def _tenants_to_compare(self) -> Sequence[tuple[str, Sequence[KeyWithFeedback]]]:
        """The tenants whose feedback is not what it was, each with its keys: who waits longest comes first."""
        found: dict[str, list[KeyWithFeedback]] = {}
        for row in self._read(select(raters.c.tenant).distinct()):
            found[row.tenant] = []  # all of its feedback may be deleted
        for key in keys_with_feedback(self._read):
            found.setdefault(key.tenant, []).append(key)
        turns = {tenant: number for number, tenant in enumerate(self._seen)}
        changed = [(tenant, keys) for tenant, keys in found.items() if self._seen.get(tenant) != _newest(keys)]
        return sorted(changed, key=lambda each: turns.get(each[0], -1))

    def _window(self, keys: Sequence[KeyWithFeedback]) -> list[Any]:
        """The newest WINDOW events of a tenant, the newest first: of each key its share, and what others leave of it.

        A key that floods must not push the others out, or nobody could be compared with it.
        """
        found: list[Any] = []
        waiting = sorted(keys, key=lambda each: (each.key is None, each.newest), reverse=True)[:_MOST_KEYS]
        share = WINDOW // max(1, len(waiting))
        shares = {each: share if each.key else max(share, min(OF_ONE, WINDOW)) for each in waiting}
        first = {key: self._read(newest_rated_of_key(key, most)) for key, most in shares.items()}
        full = {key for key, events in first.items() if len(events) == shares[key]}
        left = max(0, WINDOW - sum(map(len, first.values()))) // max(1, len(full))
        for key, events in first.items():
            found += self._read(newest_rated_of_key(key, shares[key] + left)) if key in full and left else events
        return sorted(found, key=lambda event: event.id, reverse=True)

    def quarantine(self, tenant: str, name: str, *, by: str, reason: str) -> None:
        """Hear a rater no more. Raises UnknownRater."""
        self._decide(tenant, name, RaterState.QUARANTINED, by=by, reason=reason)

    def release(self, tenant: str, name: str, *, by: str, reason: str) -> None:
        """Hear a rater again; it is not put into quarantine but by hand from now on. Raises UnknownRater."""
        self._decide(tenant, name, RaterState.ACTIVE, by=by, reason=reason)

    def _decide(self, tenant: str, name: str, state: RaterState, *, by: str, reason: str) -> None:
        with self._write() as connection:
            alone(connection, "raters")
            one = and_(raters.c.tenant == tenant, raters.c.name == name)
            changed = {
                "state": state,
                "reason": reason if state is RaterState.QUARANTINED else None,
                "released": state is RaterState.ACTIVE,
                "settled": False,
            }
            if not connection.execute(update(raters).where(one).values(changed)).rowcount:
                query = select(feedback.c.id).where(_is_by(tenant, name)).limit(1)
                if connection.execute(query).first() is None:
                    raise UnknownRater(f"there is no feedback by {name or 'a source without a name'} of {tenant}")
                row = _row((tenant, name), RaterFigures(), _Activity(0, 0, 0, 0), self._clock())
                connection.execute(insert(raters).values(row | changed))
            self._note(connection, RaterDecision(tenant, name, self._clock(), state, by, reason))
        self._settle()

    def _assess(
        self, tenant: str, newest_first: Sequence[Any], options: FeedbackSettings, trusted: Container[Rater]
    ) -> list[RaterDecision]:
        """Compare the raters of one tenant with one another alone: others rate by another scale, or mean harm."""
        events, rule, now = _newest_of_each(newest_first), self._settlement.rule, self._clock()
        before = {(tenant, row.name): row for row in self._read(select(raters).where(raters.c.tenant == tenant))}
        ignored = {who for who, row in before.items() if row.state == RaterState.QUARANTINED}
        did = _activities(rule, events)
        found = figures(_verdicts(rule, events), trusted=trusted, ignored=ignored)
        self._store({who: _row(who, found.get(who, RaterFigures()), done, now) for who, done in did.items()}, before)
        decided = []
        for who in did:
            known, reason = before.get(who), _why(options, found.get(who, RaterFigures()), did, who)
            if reason is None or who in ignored or who in trusted or (known is not None and known.released):
                continue
            decision = RaterDecision(*who, now, RaterState.QUARANTINED, BY, reason)
            if self._quarantine(decision):
                decided.append(decision)
        return decided

    def _store(self, rows: Mapping[Rater, Mapping[str, Any]], before: Mapping[Rater, Any]) -> None:
        """Write what is new. Raters of whom nothing is known and who say nothing any more are forgotten.

        A few in each transaction: others write meanwhile, and nothing rests on what was read before.
        """
        for new in _in_pages([row for who, row in rows.items() if who not in before], _WRITTEN):
            with self._write() as connection:
                alone(connection, "raters")
                put(connection, raters, [row for row in new if _has_feedback(connection, row["tenant"], row["name"])])
        for changed in _in_pages(list(_changes(rows, before)), _WRITTEN):
            with self._write() as connection:
                alone(connection, "raters")
                connection.execute(_NEW_FIGURES, changed)
        unknown = and_(
            raters.c.state == RaterState.ACTIVE, raters.c.compared < KNOWN, ~raters.c.released, raters.c.settled
        )
        for silent in _in_pages([who for who in before if who not in rows], _WRITTEN):
            with self._write() as connection:
                alone(connection, "raters")
                these = tuple_(raters.c.tenant, raters.c.name).in_(silent)
                connection.execute(delete(raters).where(unknown, these))

    def _quarantine(self, decision: RaterDecision) -> bool:
        """Whether it was put there: not who was released, or is there, meanwhile."""
        one = and_(raters.c.tenant == decision.tenant, raters.c.name == decision.name)
        free = and_(raters.c.state == RaterState.ACTIVE, ~raters.c.released)
        changed = {"state": decision.state, "reason": decision.reason, "settled": False}
        with self._write() as connection:
            alone(connection, "raters")
            done = bool(connection.execute(update(raters).where(one, free).values(changed)).rowcount)
            if done:
                self._note(connection, decision)
        return done

    def _note(self, connection: Connection, decision: RaterDecision) -> None:
        connection.execute(insert(rater_events).values(decision._asdict()))

    def _settle(self) -> None:
        """Make the rewards anew that raters had a part in of whom it was decided."""
        for row in self._read(select(raters).where(~raters.c.settled)):
            for replies in _in_pages(sorted(self._replies_of(row.tenant, row.name)), _PAGE):
                with self._write() as connection:
                    alone(connection, "record")
                    self._settlement.recompute(connection, replies)
            with self._write() as connection:
                same = and_(raters.c.tenant == row.tenant, raters.c.name == row.name, raters.c.state == row.state)
                connection.execute(update(raters).where(same).values(settled=True))

    def _replies_of(self, tenant: str, name: str) -> set[str]:
        """The replies that a rater's feedback bears on."""
        columns = (feedback.c[each] for each in ("msg_id", "other_msg_id", "tenant", "task_id", "run_id"))
        with self._write() as connection:
            alone(connection, "record")  # else what is being priced with the rater's word just now would be missed
            rows = connection.execute(select(*columns).distinct().where(_is_by(tenant, name))).all()
            whole_runs = {(row.tenant, row.task_id, row.run_id) for row in rows if row.msg_id is None}
            named = {each for row in rows for each in (row.msg_id, row.other_msg_id) if each is not None}
            return named | set(replies_of(connection, whole_runs))


def _is_by(tenant: str, name: str) -> Any:
    unnamed = feedback.c.source.is_(None) if not name else feedback.c.source == name
    return and_(feedback.c.tenant == tenant, unnamed)


def _has_feedback(connection: Connection, tenant: str, name: str) -> bool:
    """Whether a rater has feedback still: who was erased since it was read has none, and is not to be named again."""
    return (
        not name or connection.execute(select(feedback.c.id).where(_is_by(tenant, name)).limit(1)).first() is not None
    )


def _newest(keys: Sequence[KeyWithFeedback]) -> int:
    return max((key.newest for key in keys), default=0)


def _newest_of_each(newest_first: Sequence[Any]) -> list[Any]:
    """The events in their order, of one rater OF_ONE at most: a flood must not push the others out."""
    counts: Counter[Rater] = Counter()
    kept = []
    for event in newest_first:
        counts[rater_of(event)] += 1
        if counts[rater_of(event)] <= OF_ONE:
            kept.append(event)
    return kept[::-1]


def _verdicts(rule: RewardRule, events: Sequence[Any]) -> Iterator[RaterVerdict]:
    for event in events:
        value = _worth(rule, event)
        if value is not None:
            yield RaterVerdict(rater_of(event), (event.tenant, event.msg_id, event.choice), event.metric, value)


def _worth(rule: RewardRule, row: Any) -> float | None:
    content = (Kind(row.kind), row.metric, row.value, row.text, row.source)
    return worth(rule, Event(row.id, *content, preferred=True, received_at=row.received_at))


def _activities(rule: RewardRule, events: Sequence[Any]) -> dict[Rater, _Activity]:
    by_rater: dict[Rater, list[Any]] = defaultdict(list)
    for event in events:
        by_rater[rater_of(event)].append(event)
    return {rater: _activity(rule, events) for rater, events in by_rater.items()}


def _activity(rule: RewardRule, events: Sequence[Any]) -> _Activity:
    numbers = [each for each in events if each.kind == Kind.NUMBER]
    extreme = sum(is_clipped(rule, each.metric, each.value) for each in numbers)
    [(_, on_one)] = Counter((each.msg_id, each.metric) for each in events).most_common(1)
    return _Activity(len(events), len(numbers), extreme, on_one)


def _why(options: FeedbackSettings, found: RaterFigures, did: Mapping[Rater, _Activity], who: Rater) -> str | None:
    """Why a rater is an outlier, if it is one and others are there that are none."""
    own = did[who]
    below = options.quarantine_below
    if below is None or len(did) < 2:
        return None
    if found.compared >= options.quarantine_after and found.highest < below:
        return (
            f"it agrees with the others in {found.agreement:.0%} of {found.compared} comparisons: surely less than"
            f" feedback.quarantine_below, {below:g}"
        )
    numbers = sum(each.numbers for rater, each in did.items() if rater != who)
    of_others = sum(each.extreme for rater, each in did.items() if rater != who)
    rare = numbers >= EXTREME_LEAST and of_others <= EXTREME_OF_OTHERS * numbers
    if rare and own.extreme >= max(EXTREME_LEAST, EXTREME_SHARE * own.numbers):
        return f"{own.extreme} of its {own.numbers} numbers are beyond reward.clip, of the others' {of_others}"
    if own.on_one > max(ON_ONE_REPLY, own.events / 2):
        return f"{own.on_one} of its {own.events} events are about one reply, under one metric"
    return None


def _row(who: Rater, found: RaterFigures, did: _Activity, now: float) -> dict[str, Any]:
    return {
        "tenant": who[0],
        "name": who[1],
        "state": RaterState.ACTIVE,
        "reliability": found.reliability,
        "compared": found.compared,
        "events": did.events,
        "extreme": did.extreme,
        "released": False,
        "settled": True,
        "reason": None,
        "updated_at": now,
    }


def _changes(rows: Mapping[Rater, Mapping[str, Any]], before: Mapping[Rater, Any]) -> Iterator[Mapping[str, Any]]:
    """The new figures of raters that there were before, as parameters of _NEW_FIGURES."""
    for who in rows.keys() & before.keys():
        row, known = rows[who], before[who]
        less = row["compared"] < min(KNOWN, known.compared)  # what was known of it is worth more
        after = {**row, "reliability": known.reliability, "compared": known.compared} if less else row
        if any(getattr(known, name) != after[name] for name in _FIGURES):
            yield {f"its_{name}": after[name] for name in ("tenant", "name", *_FIGURES, "updated_at")}


def _in_pages(values: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for begin in range(0, len(values), size):
        yield values[begin : begin + size]
