"""Which committed rows the next batch is made of: by order, by group, with a fair share for each tenant and rater.

A claim reads only as many rows as it takes from each tenant that has some waiting. Everything here runs inside a
transaction of the ledger, under the trainer's epoch. What waits beyond the backlog's bound is set aside between
versions only: what no version contains yet is leased again after a crash, in the same order.

Who says more than most others in the newest feedback, or less, weighs less where others gave feedback too, and has no
more than its share of a batch. The application's own word and that of trusted raters is not limited; nor is any rater's
before there are so many raters that each can have a share. All names that are used with one key are one rater here.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    TextClause,
    and_,
    bindparam,
    func,
    not_,
    or_,
    select,
    text,
    tuple_,
    update,
)

from tuneloop.shared.experience import KEY_SOURCE, Kind, Rater, RaterState, State, rater_of, voice_of
from tuneloop.shared.ledger.recording.reward_rule import without_quarantined
from tuneloop.shared.ledger.recording.rewards import TRAJECTORY, event_order, rules_of, weighted_rewards
from tuneloop.shared.ledger.storage.database import find, literally, portions
from tuneloop.shared.ledger.storage.schema import COMMITTED, EDITED, RATED, experiences, feedback, raters
from tuneloop.shared.ledger.training.groups import BatchRules, gather, of_policy, takable, young

#: So many times the rows of a batch are looked through for others' rows. If that is not enough, what one rater has too
#: many of is dropped, so that others' rows beyond it are found.
WINDOW = 4

REASON = "its rater has more of the waiting feedback than feedback.max_rater_share lets into batches"


#: The voters, by `voter_of`: other names of sources with a key are of raters with a decision.
_IS_VOTER = or_(~raters.c.name.startswith(KEY_SOURCE), raters.c.name.like(f"{KEY_SOURCE}%/"))
_VOTERS = select(raters.c.tenant, raters.c.name).where(
    raters.c.state == RaterState.ACTIVE, raters.c.name != "", _IS_VOTER
)

#: The events by which it is seen who says more than others, the newest of all.
_NEWEST = select(feedback.c.tenant, feedback.c.source).where(text(RATED)).order_by(feedback.c.id.desc()).limit(4_000)

_REWARDING = update(experiences).where(experiences.c.id == bindparam("its_id")).values(reward=bindparam("its_reward"))


class Unit(NamedTuple):
    number: int
    rows: tuple[int, ...]


def is_limited(connection: Connection, rules: BatchRules) -> bool:
    """Whether there are so many raters that each can be held to its share."""
    if rules.max_rater_share >= 1:
        return False
    enough = _enough(rules)
    # As many as may turn out to be no voters are read besides.
    some = connection.execute(_VOTERS.limit(enough + len(rules.trusted_raters.named) + 1)).all()
    return len([row for row in some if tuple(row) not in rules.trusted_raters]) >= enough


def _enough(rules: BatchRules) -> int:
    return math.ceil(1 / rules.max_rater_share)


def within_shares(
    connection: Connection, units: Sequence[Unit], rules: BatchRules, size: int, *, held: Collection[int] = ()
) -> list[Unit]:
    """The first units, of `size` rows at least, `held` ones included, in which no rater has more than its share."""
    ids = [*held, *(row for unit in units for row in unit.rows)]
    shares = _Shares(_words(connection, ids, rules), rules, size)
    shares.hold(held)
    rest = shares.take(units)
    if shares.total < size and sum(len(unit.rows) for unit in units) >= WINDOW * size:
        ids = [row for unit in rest[: (len(rest) + 1) // 2] for row in unit.rows]
        for portion in portions(ids):
            dropped = {"state": State.DROPPED, "reason": REASON, "group_id": None}
            connection.execute(update(experiences).where(experiences.c.id.in_(portion)).values(dropped))
    return shares.taken


def count_held_rows(connection: Connection, units: Sequence[Unit], rules: BatchRules, size: int) -> dict[Rater, int]:
    """How many rows of the units each rater keeps out of a batch of `size`, if the batch is not full without them."""
    shares = _Shares(_words(connection, [row for unit in units for row in unit.rows], rules), rules, size)
    rest = shares.take(units)
    return {} if shares.total >= size else dict(shares.count_over(rest).most_common())


def weigh_rewards(connection: Connection, units: Sequence[Unit], rules: BatchRules) -> None:
    """Give the rows of a batch the rewards that they have when who rates more than others weighs less."""
    words = _words(connection, [row for unit in units for row in unit.rows], rules)
    apart = [row for row, by in words.items() if len(by) > 1 and min(by.values()) < 1]
    weights = {rater: weight for row in apart for rater, weight in words[row].items()}
    replies = {row.msg_id for row in find(connection.execute, select(experiences.c.msg_id), experiences.c.id, apart)}
    found: dict[int, float | None] = {}
    for rule, msg_ids in rules_of(connection, replies).values():
        found |= weighted_rewards(connection, msg_ids, rule, rules.trusted_raters, weights)
    if rewards := [{"its_id": row, "its_reward": found[row]} for row in apart if found.get(row) is not None]:
        connection.execute(_REWARDING, rewards)


class _Shares:
    """What each rater has of a batch so far, in rows."""

    def __init__(self, words: Mapping[int, Mapping[Rater, float]], rules: BatchRules, size: int) -> None:
        self.taken: list[Unit] = []
        self.total = 0
        self._words, self._size = words, size
        self._most = rules.max_rater_share * size
        self._had: dict[Rater, float] = defaultdict(float)

    def count_over(self, units: Sequence[Unit]) -> Counter[Rater]:
        rows: Counter[Rater] = Counter()
        for unit in units:
            rows.update(dict.fromkeys(self._over(_parts(self._words, unit)), len(unit.rows)))
        return rows

    def hold(self, ids: Collection[int]) -> None:
        for id_ in ids:
            self._count(Unit(id_, (id_,)))

    def take(self, units: Sequence[Unit]) -> list[Unit]:
        rest = []
        for unit in units:
            if self.total >= self._size:
                break
            if self._over(_parts(self._words, unit)):
                rest.append(unit)
            else:
                self._count(unit)
                self.taken.append(unit)
        return rest

    def _over(self, parts: Mapping[Rater, float]) -> set[Rater]:
        return {rater for rater, part in parts.items() if self._had[rater] and self._had[rater] + part > self._most}

    def _count(self, unit: Unit) -> None:
        for rater, part in _parts(self._words, unit).items():
            self._had[rater] += part
        self.total += len(unit.rows)


def _parts(words: Mapping[int, Mapping[Rater, float]], unit: Unit) -> dict[Rater, float]:
    """How much of a unit is each rater's word, in rows: that of trusted ones counts for no rater."""
    parts: dict[Rater, float] = defaultdict(float)
    for row in unit.rows:
        by = words.get(row, {})
        for rater, weight in by.items():
            parts[rater] += weight / sum(by.values())
    return parts


def _words(connection: Connection, ids: Collection[int], rules: BatchRules) -> dict[int, dict[Rater, float]]:
    """Whose feedback counts for each row's reward, and how much; only a trusted rater's, where there is one."""
    names = select(*(experiences.c[name] for name in ("id", "msg_id", *TRAJECTORY)))
    rows = find(connection.execute, names, experiences.c.id, ids)
    columns = select(*(feedback.c[name] for name in ("msg_id", *TRAJECTORY, "source"))).distinct()
    events = find(connection.execute, columns, feedback.c.msg_id, {row.msg_id for row in rows})
    runs = {(row.tenant, row.task_id, row.run_id) for row in rows if None not in (row.task_id, row.run_id)}
    named = tuple_(*(feedback.c[name] for name in TRAJECTORY))
    events += find(connection.execute, columns.where(feedback.c.msg_id.is_(None)), named, runs, of=3)
    by_target: dict[object, set[Rater]] = defaultdict(set)
    for event in without_quarantined(connection, events):
        by_target[event.msg_id or (event.tenant, event.task_id, event.run_id)].add(rater_of(event))
    weigh = _weights(connection, rules)
    found = {}
    for row in rows:
        said_by = by_target[row.msg_id] | by_target[row.tenant, row.task_id, row.run_id]
        is_settled = any(rater in rules.trusted_raters for rater in said_by)
        voters = set() if is_settled else {_voice(rater) for rater in said_by}
        found[row.id] = {voter: weigh(voter) for voter in voters}
    return found


def _weights(connection: Connection, rules: BatchRules) -> Callable[[Rater], float]:
    """How much each voter weighs, from 0 to 1: less, the further its count of events is from its tenant's median."""
    counts: dict[str, Counter[Rater]] = defaultdict(Counter)
    for tenant, source in connection.execute(_NEWEST):
        if (tenant, source or "") not in rules.trusted_raters:
            counts[tenant][_voice((tenant, source or ""))] += 1
    middles = {}
    for tenant, counted in counts.items():
        staying = [count for count in counted.values() if count > 1]
        middles[tenant] = median(staying if len(staying) >= _enough(rules) else counted.values())

    def weigh(voice: Rater) -> float:
        middle, count = middles.get(voice[0], 1), max(counts[voice[0]][voice], 1)
        return min(middle / count, count / middle)

    return weigh


def _voice(rater: Rater) -> Rater:
    return rater[0], voice_of(rater[1])


def demonstrations(connection: Connection, rows: Sequence[Any]) -> dict[int, str]:
    """The latest edited answer of each row that has one; one about a run is of its replies without one of their own."""
    about: dict[object, list[Any]] = defaultdict(list)
    for event in sorted(without_quarantined(connection, [*_edits_about(connection, rows)]), key=event_order):
        about[event.msg_id or _run(event)].append(event)
    found: dict[int, str] = {}
    for row in rows if about else ():
        for events in (about.get(_run(row), ()), about.get(row.msg_id, ())):
            own = (event for event in events if event.tenant == row.tenant and event.choice in (None, row.choice))
            latest: dict[tuple[str, str | None], str] = {}
            for event in own:
                # Removed before it is added again, so that the last entry is the latest event.
                latest.pop((event.metric, event.source), None)
                if event.kind == Kind.DEMONSTRATION:
                    latest[event.metric, event.source] = event.text
            if latest:
                found[row.id] = next(reversed(latest.values()))
    return found


def _edits_about(connection: Connection, rows: Sequence[Any]) -> Iterator[Any]:
    of_these = select(feedback).where(feedback.c.kind.in_((Kind.DEMONSTRATION, Kind.RETRACTION)))
    yield from find(connection.execute, of_these, feedback.c.msg_id, {row.msg_id for row in rows})
    named = tuple_(*(feedback.c[name] for name in TRAJECTORY))
    runs = {_run(row) for row in rows if None not in _run(row)}
    yield from find(connection.execute, of_these.where(feedback.c.msg_id.is_(None)), named, runs, of=3)


def _run(row: Any) -> tuple[str, str | None, str | None]:
    return row.tenant, row.task_id, row.run_id


_COMMITTED = literally(COMMITTED)

#: The tenants that have rows waiting: one look into the index for each, where DISTINCT would read every row.
_TENANTS = f"""
    WITH RECURSIVE waiting(tenant) AS (
        SELECT min(tenant) FROM experiences {{hint}} WHERE {COMMITTED} AND policy = :policy
        UNION ALL
        SELECT (
            SELECT min(tenant) FROM experiences {{hint}}
            WHERE {COMMITTED} AND policy = :policy AND tenant > waiting.tenant
        )
        FROM waiting WHERE waiting.tenant IS NOT NULL
    )
    SELECT tenant FROM waiting WHERE tenant IS NOT NULL
"""


def committed_by(index: str, *what: ColumnElement[Any]) -> Select[Any]:
    """Of committed rows. SQLite needs the index's name: by itself it uses one of all states."""
    hint = f"INDEXED BY ix_experiences_{index}"
    return select(*what).select_from(experiences).where(_COMMITTED).with_hint(experiences, hint, "sqlite")


def unsampled_rows(rules: BatchRules, *what: ColumnElement[Any]) -> Select[Any]:
    return committed_by("unsampled", *what).where(of_policy(rules), experiences.c.unsampled.is_not(None))


def edited_rows(rules: BatchRules, *what: ColumnElement[Any]) -> Select[Any]:
    return committed_by("edited", *what).where(of_policy(rules), literally(EDITED))


def expire(connection: Connection, rules: BatchRules, *, newest: int) -> None:
    """Expire rows that are too old to be trained on, each with its whole group."""
    if rules.max_staleness is None:
        return
    too_old = and_(_COMMITTED, of_policy(rules), not_(young(rules)))
    groups = select(experiences.c.group_id).where(too_old, experiences.c.group_id.is_not(None))
    sampled = f"sampled more than {rules.max_staleness} versions before {newest}"
    set_aside(connection, and_(_COMMITTED, experiences.c.group_id.in_(groups)), f"of a group {sampled}, in part")
    set_aside(connection, too_old, sampled)


def claim(connection: Connection, rules: BatchRules, size: int, held: Collection[int] = (), *, now: float) -> list[int]:
    """The next batch's ids, `size` rows or more with those `held`; none if too few, before `batch_timeout`."""
    if not rules.any_reply:
        # Drop what is no sample of the policy, with the reason; what is left of its group is gathered again.
        rows = connection.execute(unsampled_rows(rules, experiences.c.id, experiences.c.group_id)).all()
        dropped = {"state": State.DROPPED, "reason": experiences.c.unsampled}
        for portion in portions([row.id for row in rows]):
            connection.execute(update(experiences).where(_COMMITTED, experiences.c.id.in_(portion)).values(dropped))
        _ungroup(connection, {row.group_id for row in rows} - {None})
    if not rules.edited:  # the trainer before this one may have had another method
        _ungroup(connection, {*connection.execute(edited_rows(rules, experiences.c.group_id)).scalars()} - {None})
    missing = size - len(held)
    limited = is_limited(connection, rules)
    most = WINDOW * size if limited else missing
    if rules.group_by != "none":
        gather(connection, rules, now=now)
    units = _next_units(connection, rules, most, missing)
    if limited and _is_enough(connection, units, missing, rules, now=now):
        units = within_shares(connection, units, rules, size, held=held)
    if not _is_enough(connection, units, missing, rules, now=now):
        return []
    if limited:
        weigh_rewards(connection, units, rules)
    return [row for unit in units for row in unit.rows]


def held_by_shares(connection: Connection, rules: BatchRules, size: int) -> dict[Rater, int]:
    """How many rows each rater's share keeps out, if it is for them that no batch of `size` is taken."""
    if not is_limited(connection, rules):
        return {}
    units = _next_units(connection, rules, WINDOW * size, size, lock=False)
    return count_held_rows(connection, units, rules, size) if sum(len(unit.rows) for unit in units) >= size else {}


def _is_enough(connection: Connection, units: Sequence[Unit], missing: int, rules: BatchRules, *, now: float) -> bool:
    if sum(len(unit.rows) for unit in units) >= missing:
        return True
    if rules.batch_timeout is None:
        return False
    # Or of what there is, where that has waited for others for too long.
    waiting = select(func.min(experiences.c.committed_at)).where(_COMMITTED, takable(rules))
    oldest = connection.execute(waiting).scalar()
    return oldest is not None and now - oldest >= rules.batch_timeout


def _next_units(connection: Connection, rules: BatchRules, most: int, missing: int, *, lock: bool = True) -> list[Unit]:
    tenants = connection.execute(tenants_in(rules, connection.dialect.name)).scalars().all()
    if rules.group_by != "none":
        return _next_groups(connection, tenants, rules, most, missing, lock=lock)
    queries = (next_of(each, rules, most) for each in tenants)
    if lock:  # What someone is changing right now is left out.
        queries = (query.with_for_update(skip_locked=True) for query in queries)
    rows = _by_turns([connection.execute(query).all() for query in queries])[:most]
    return [Unit(row.id, (row.id,)) for row in rows]


def next_of(tenant: str, rules: BatchRules, size: int) -> Select[Any]:
    by: dict[str, list[Any]] = {
        "oldest": [experiences.c.id],
        "freshest": [experiences.c.id.desc()],
        "priority": [experiences.c.priority.desc(), experiences.c.id],
    }
    return (
        select(experiences.c.id, experiences.c.priority)
        .where(_COMMITTED, experiences.c.tenant == tenant, takable(rules))
        .order_by(*by[rules.order])
        .limit(size)
    )


def tenants_in(rules: BatchRules, dialect: str) -> TextClause:
    hint = "INDEXED BY ix_experiences_committed" if dialect == "sqlite" else ""
    return text(_TENANTS.format(hint=hint)).bindparams(policy=rules.policy)


def _ungroup(connection: Connection, groups: Collection[int]) -> None:
    for portion in portions(groups):
        rest = and_(_COMMITTED, experiences.c.group_id.in_(portion))
        connection.execute(update(experiences).where(rest).values(group_id=None))


def set_aside(connection: Connection, which: ColumnElement[bool], reason: str) -> int:
    # All lock in this order: else this and new feedback about two of them would wait for each other.
    query = select(experiences.c.id).where(which).order_by(experiences.c.id).with_for_update()
    found = connection.execute(query).scalars().all()
    for portion in portions(found):
        aside = update(experiences).where(experiences.c.id.in_(portion))
        connection.execute(aside.values(state=State.EXPIRED, reason=reason))
    return len(found)


# Groups.


def _next_groups(
    connection: Connection, tenants: Sequence[str], rules: BatchRules, most: int, missing: int, *, lock: bool
) -> list[Unit]:
    """The next groups, of `most` rows at least if there are so many; none if `missing` are needed and not there."""
    queues = [connection.execute(next_groups(each, rules, most)).all() for each in tenants]
    chosen, total = list[int](), 0
    for group in _by_turns(queues):
        if total < most:
            chosen.append(group.group_id)
            total += group.rows
    if total < missing and rules.batch_timeout is None:
        return []
    members: dict[int, list[int]] = defaultdict(list)
    for portion in portions(chosen):
        query = select(experiences.c.group_id, experiences.c.id).where(_COMMITTED, experiences.c.group_id.in_(portion))
        ordered = query.order_by(experiences.c.id)
        for group_id, row in connection.execute(ordered.with_for_update() if lock else ordered):
            members[group_id].append(row)
    return [Unit(group_id, tuple(members[group_id])) for group_id in chosen if group_id in members]


def next_groups(tenant: str, rules: BatchRules, size: int) -> Any:
    group_id = experiences.c.group_id
    return (
        select(group_id, func.count().label("rows"))
        .where(_COMMITTED, of_policy(rules), experiences.c.tenant == tenant, group_id.is_not(None))
        .group_by(group_id)
        .order_by(group_id.desc() if rules.order == "freshest" else group_id)
        .limit(size)
    )


T = TypeVar("T")


class Backlog(NamedTuple):
    waiting: int
    set_aside: int


def trim(connection: Connection, rules: BatchRules) -> Backlog:
    waiting = connection.execute(
        select(func.count()).select_from(experiences).where(_COMMITTED, of_policy(rules))
    ).scalar_one()
    most = rules.max_backlog
    if most is None or rules.any_reply or waiting <= most:
        return Backlog(waiting, 0)
    room, beyond = most, list[int]()
    # What a batch may be made of: rows, or the groups that are complete.
    columns = (experiences.c[name] for name in ("id", "group_id", "tenant", "priority"))
    query = select(*columns).where(_COMMITTED, takable(rules)).order_by(experiences.c.id)
    grouped = rules.group_by != "none"
    if grouped:
        query = query.where(experiences.c.group_id.is_not(None))
    members: dict[int, list[Any]] = defaultdict(list)
    for row in connection.execute(query):
        members[row.group_id if grouped else row.id].append(row)
    by_priority = rules.order == "priority"
    order = sorted(members, key=lambda each: (members[each][0].priority if by_priority else 0.0, each), reverse=True)
    queues: dict[str, list[list[Any]]] = defaultdict(list)
    for number in order:
        queues[members[number][0].tenant].append(members[number])
    for rows in _by_turns(queues.values()):
        if room <= 0:
            beyond += [row.id for row in rows]
        room -= len(rows)
    reason = f"more than {most} experiences waited: buffer.max_backlog"
    these = (and_(experiences.c.id.in_(portion), _COMMITTED) for portion in portions(sorted(beyond)))
    expired = sum(set_aside(connection, which, reason) for which in these)
    return Backlog(waiting - expired, expired)


def _by_turns(queues: Iterable[Sequence[T]]) -> list[T]:
    return [thing for turn in zip_longest(*queues) for thing in turn if thing is not None]
