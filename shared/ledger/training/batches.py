"""Which committed rows the next batch is made of: by order, by group, with a fair share for each tenant.

A claim reads only as many rows as it takes from each tenant that has some waiting, whatever else waits. Everything here
runs inside a transaction of the ledger, under the trainer's epoch.

What waits beyond the backlog's bound is set aside between versions only: what no version contains yet is leased again
after a crash, in the same order. Methods that learn from any reply learn the same from an old one.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, TextClause, and_, func, not_, select, text, update

from tuneloop.shared.experience import Rater, State
from tuneloop.shared.ledger.storage.database import portions
from tuneloop.shared.ledger.storage.schema import COMMITTED, EDITED, experiences
from tuneloop.shared.ledger.training.batch_policy import BatchPolicy
from tuneloop.shared.ledger.training.groups import gather, takable, young
from tuneloop.shared.ledger.training.rater_shares import (
    WINDOW,
    Unit,
    count_held_rows,
    is_limited,
    main_raters,
    weigh_rewards,
    within_shares,
)

#: Not a comparison with a parameter: then the planner would not see that the partial indexes apply.
_COMMITTED: ColumnElement[bool] = text(COMMITTED)  # type: ignore[assignment]

#: The tenants that have rows waiting: one look into the index for each, where DISTINCT would read every row.
TENANTS = f"""
    WITH RECURSIVE waiting(tenant) AS (
        SELECT min(tenant) FROM experiences {{hint}} WHERE {COMMITTED}
        UNION ALL
        SELECT (SELECT min(tenant) FROM experiences {{hint}} WHERE {COMMITTED} AND tenant > waiting.tenant)
        FROM waiting WHERE waiting.tenant IS NOT NULL
    )
    SELECT tenant FROM waiting WHERE tenant IS NOT NULL
"""

#: The committed rows that are not samples of the policy.
UNSAMPLED = f"SELECT id, group_id FROM experiences {{hint}} WHERE {COMMITTED} AND unsampled IS NOT NULL"

#: The groups with committed rows that were edited and not rated.
EDITED_GROUPS = f"SELECT DISTINCT group_id FROM experiences {{hint}} WHERE {COMMITTED} AND {EDITED}"

_INDEXES = {
    TENANTS: "ix_experiences_committed",
    UNSAMPLED: "ix_experiences_unsampled",
    EDITED_GROUPS: "ix_experiences_edited",
}


def expire(connection: Connection, policy: BatchPolicy, *, newest: int) -> None:
    """Set aside what is too old to be trained on, and with it the whole group that it belongs to."""
    if policy.max_staleness is None:
        return
    too_old = and_(_COMMITTED, not_(young(policy, newest=newest)))
    groups = select(experiences.c.group_id).where(too_old, experiences.c.group_id.is_not(None))
    sampled = f"sampled more than {policy.max_staleness} versions before {newest}"
    set_aside(connection, and_(_COMMITTED, experiences.c.group_id.in_(groups)), f"of a group {sampled}, in part")
    set_aside(connection, too_old, sampled)


def claim(
    connection: Connection, policy: BatchPolicy, size: int, held: Collection[int] = (), *, newest: int, now: float
) -> list[int]:
    """The ids of the next batch, of `size` rows, or of whole groups of at least so many, that are not `held` already.

    If there are not enough, none; or, after `batch_timeout`, what there is.
    """
    if not policy.any_reply:
        # Drop what is no sample of the policy, with the reason; what is left of its group is gathered again.
        rows = connection.execute(by_index(UNSAMPLED, connection.dialect.name)).all()
        dropped = {"state": State.DROPPED, "reason": experiences.c.unsampled}
        for portion in portions([row.id for row in rows]):
            connection.execute(update(experiences).where(_COMMITTED, experiences.c.id.in_(portion)).values(dropped))
        _ungroup(connection, {row.group_id for row in rows} - {None})
    if not policy.edited:  # the trainer before this one may have had another method
        edited = connection.execute(by_index(EDITED_GROUPS, connection.dialect.name)).scalars()
        _ungroup(connection, {*edited} - {None})
    missing = size - len(held)
    limited = is_limited(connection, policy)
    most = WINDOW * size if limited else missing
    if policy.group_by != "none":
        gather(connection, policy, newest=newest, now=now)
    units = _next_units(connection, policy, most, missing)
    if limited and _is_enough(connection, units, missing, policy, now=now):
        units = within_shares(connection, units, policy, size, held=held)
    if not _is_enough(connection, units, missing, policy, now=now):
        return []
    if limited:
        weigh_rewards(connection, units, policy)
    return [row for unit in units for row in unit.rows]


def held_by_shares(connection: Connection, policy: BatchPolicy, size: int) -> dict[Rater, int]:
    """How many rows each rater's share keeps out, if it is for them that no batch of `size` is taken."""
    if not is_limited(connection, policy):
        return {}
    units = _next_units(connection, policy, WINDOW * size, size, lock=False)
    return count_held_rows(connection, units, policy, size) if sum(len(unit.rows) for unit in units) >= size else {}


def _is_enough(connection: Connection, units: Sequence[Unit], missing: int, policy: BatchPolicy, *, now: float) -> bool:
    """Whether a batch is made of these."""
    if sum(len(unit.rows) for unit in units) >= missing:
        return True
    if policy.batch_timeout is None:
        return False
    # Or of what there is, where that has waited for others for too long.
    waiting = select(func.min(experiences.c.committed_at)).where(_COMMITTED, takable(policy))
    oldest = connection.execute(waiting).scalar()
    return oldest is not None and now - oldest >= policy.batch_timeout


def _next_units(
    connection: Connection, policy: BatchPolicy, most: int, missing: int, *, lock: bool = True
) -> list[Unit]:
    """What the next batch is made of, `most` rows at least if there are so many."""
    if policy.group_by != "none":
        return _next_groups(connection, policy, most, missing, lock=lock)
    queries = (next_of(each, policy, most) for each in _tenants(connection))
    if lock:  # What someone is changing right now is left out.
        queries = (query.with_for_update(skip_locked=True) for query in queries)
    rows = _by_turns([connection.execute(query).all() for query in queries])[:most]
    return [Unit(row.id, (row.id,)) for row in rows]


def next_of(tenant: str, policy: BatchPolicy, size: int) -> Select[Any]:
    """A tenant's next rows."""
    by: dict[str, list[Any]] = {
        "oldest": [experiences.c.id],
        "freshest": [experiences.c.id.desc()],
        "priority": [experiences.c.priority.desc(), experiences.c.id],
    }
    return (
        select(experiences.c.id, experiences.c.priority)
        .where(_COMMITTED, experiences.c.tenant == tenant, takable(policy))
        .order_by(*by[policy.order])
        .limit(size)
    )


def by_index(statement: str, dialect: str) -> TextClause:
    """TENANTS, UNSAMPLED or EDITED_GROUPS. SQLite must be told the index: by itself it takes one of all states."""
    hint = f"INDEXED BY {_INDEXES[statement]}" if dialect == "sqlite" else ""
    return text(statement.format(hint=hint))


def _tenants(connection: Connection) -> Sequence[str]:
    return connection.execute(by_index(TENANTS, connection.dialect.name)).scalars().all()


def _ungroup(connection: Connection, groups: Collection[int]) -> None:
    for portion in portions(groups):
        rest = and_(_COMMITTED, experiences.c.group_id.in_(portion))
        connection.execute(update(experiences).where(rest).values(group_id=None))


def set_aside(connection: Connection, which: ColumnElement[bool], reason: str) -> int:
    """Let rows expire; how many they were."""
    # All lock in this order: else this and new feedback about two of them would wait for each other.
    query = select(experiences.c.id).where(which).order_by(experiences.c.id).with_for_update()
    found = connection.execute(query).scalars().all()
    for portion in portions(found):
        aside = update(experiences).where(experiences.c.id.in_(portion))
        connection.execute(aside.values(state=State.EXPIRED, reason=reason))
    return len(found)


# Groups.


def _next_groups(connection: Connection, policy: BatchPolicy, most: int, missing: int, *, lock: bool) -> list[Unit]:
    """The next groups, of `most` rows at least if there are so many; none if `missing` are needed and not there."""
    queues = [connection.execute(next_groups(each, policy.order, most)).all() for each in _tenants(connection)]
    chosen, total = list[int](), 0
    for group in _by_turns(queues):
        if total < most:
            chosen.append(group.group_id)
            total += group.rows
    if total < missing and policy.batch_timeout is None:
        return []
    members: dict[int, list[int]] = defaultdict(list)
    for portion in portions(chosen):
        query = select(experiences.c.group_id, experiences.c.id).where(_COMMITTED, experiences.c.group_id.in_(portion))
        ordered = query.order_by(experiences.c.id)
        for group_id, row in connection.execute(ordered.with_for_update() if lock else ordered):
            members[group_id].append(row)
    return [Unit(group_id, tuple(members[group_id])) for group_id in chosen if group_id in members]


def next_groups(tenant: str, order: str, size: int) -> Any:
    """A tenant's next groups, with how many rows each has."""
    group_id = experiences.c.group_id
    return (
        select(group_id, func.count().label("rows"))
        .where(_COMMITTED, experiences.c.tenant == tenant, group_id.is_not(None))
        .group_by(group_id)
        .order_by(group_id.desc() if order == "freshest" else group_id)
        .limit(size)
    )


T = TypeVar("T")


class Backlog(NamedTuple):
    """How many committed experiences wait for a batch, and how many did that have been set aside now."""

    waiting: int
    set_aside: int


def trim(connection: Connection, policy: BatchPolicy) -> Backlog:
    """Let what waits beyond `policy.max_backlog` expire."""
    waiting = connection.execute(select(func.count()).select_from(experiences).where(_COMMITTED)).scalar_one()
    most = policy.max_backlog
    if most is None or policy.any_reply or waiting <= most:
        return Backlog(waiting, 0)
    room, beyond = most, list[int]()
    # What a batch may be made of: rows, or the groups that are complete.
    columns = (experiences.c[name] for name in ("id", "group_id", "tenant", "priority"))
    query = select(*columns).where(_COMMITTED, takable(policy)).order_by(experiences.c.id)
    grouped = policy.group_by != "none"
    if grouped:
        query = query.where(experiences.c.group_id.is_not(None))
    members: dict[int, list[Any]] = defaultdict(list)
    for row in connection.execute(query):
        members[row.group_id if grouped else row.id].append(row)
    by_priority = policy.order == "priority"
    order = sorted(members, key=lambda each: (members[each][0].priority if by_priority else 0.0, each), reverse=True)
    units = [Unit(number, tuple(row.id for row in members[number])) for number in order]
    if is_limited(connection, policy):
        raters = main_raters(connection, units, policy)
        units = _in_turn(units, lambda each: raters[each.number])
    for each in _in_turn(units, lambda each: members[each.number][0].tenant):
        if room <= 0:
            beyond += each.rows
        room -= len(each.rows)
    reason = f"more than {most} experiences waited: buffer.max_backlog"
    these = (and_(experiences.c.id.in_(portion), _COMMITTED) for portion in portions(sorted(beyond)))
    expired = sum(set_aside(connection, which, reason) for which in these)
    return Backlog(waiting - expired, expired)


def _in_turn(things: Sequence[T], of: Callable[[T], Hashable]) -> list[T]:
    """The first of each owner, in their order, then the second of each that has one, and so on."""
    queues: dict[Hashable, list[T]] = defaultdict(list)
    for thing in things:
        queues[of(thing)].append(thing)
    return _by_turns(queues.values())


def _by_turns(queues: Iterable[Sequence[T]]) -> list[T]:
    """One from each queue, then one more from each that has one, and so on."""
    return [thing for turn in zip_longest(*queues) for thing in turn if thing is not None]
