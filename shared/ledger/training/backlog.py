"""What waits beyond the backlog's bound is set aside, so that what is trained on stays fresh when more comes in.

Only between versions: what no version contains yet is leased again after a crash, in the same order. The freshest stay,
the tenants in turn, and within a tenant the raters where their shares are limited. Methods that learn from any reply
learn the same from an old one: of theirs nothing is set aside.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, and_, func, select, text

from tuneloop.shared.ledger.storage.schema import COMMITTED, experiences
from tuneloop.shared.ledger.storage.transactions import portions
from tuneloop.shared.ledger.training.batch_policy import BatchPolicy
from tuneloop.shared.ledger.training.batches import set_aside
from tuneloop.shared.ledger.training.groups import takable
from tuneloop.shared.ledger.training.rater_shares import Unit, is_limited, main_raters

#: Not a comparison with a parameter: then the planner would not see that the partial indexes apply.
_COMMITTED: ColumnElement[bool] = text(COMMITTED)  # type: ignore[assignment]

T = TypeVar("T")


class Backlog(NamedTuple):
    """How many committed experiences wait for a batch, and how many did that have been set aside now."""

    waiting: int
    set_aside: int


class _Waiting(NamedTuple):
    unit: Unit
    tenant: str
    priority: float


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
    units: dict[int, list[Any]] = defaultdict(list)
    for row in connection.execute(query):
        units[row.group_id if grouped else row.id].append(row)
    for each in _freshest_first(
        connection,
        [
            _Waiting(Unit(number, tuple(row.id for row in rows)), rows[0].tenant, rows[0].priority)
            for number, rows in units.items()
        ],
        policy,
    ):
        if room <= 0:
            beyond += each.unit.rows
        room -= len(each.unit.rows)
    reason = f"more than {most} experiences waited: buffer.max_backlog"
    these = (and_(experiences.c.id.in_(portion), _COMMITTED) for portion in portions(sorted(beyond)))
    expired = sum(set_aside(connection, which, reason) for which in these)
    return Backlog(waiting - expired, expired)


def _freshest_first(connection: Connection, waiting: Sequence[_Waiting], policy: BatchPolicy) -> Sequence[_Waiting]:
    by_priority = policy.order == "priority"
    found = sorted(waiting, key=lambda each: (each.priority if by_priority else 0.0, each.unit.number), reverse=True)
    if is_limited(connection, policy):
        raters = main_raters(connection, [each.unit for each in found], policy)
        found = _in_turn(found, lambda each: raters[each.unit.number])
    return _in_turn(found, lambda each: each.tenant)


def _in_turn(things: Sequence[T], of: Callable[[T], Hashable]) -> list[T]:
    """The first of each owner, in their order, then the second of each that has one, and so on."""
    queues: dict[Hashable, list[T]] = defaultdict(list)
    for thing in things:
        queues[of(thing)].append(thing)
    return [thing for turn in zip_longest(*queues.values()) for thing in turn if thing is not None]
