"""The newest feedback of each key, found by steps in an index: what others say meanwhile is not read."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, and_, case, func, select

from tuneloop.shared.ledger.storage.schema import feedback

# Where few events are wanted, no more than so many times the events asked for are read.
_STRETCH = 10

_COLUMNS = ("id", "tenant", "msg_id", "choice", "kind", "metric", "value", "text", "source", "received_at")

_FIRST = select(func.min(feedback.c.tenant).label("tenant")).cte("tenants", recursive=True)
_NEXT = select(func.min(feedback.c.tenant)).where(feedback.c.tenant > _FIRST.c.tenant).correlate(_FIRST)
# The last row has none: there is no next one.
_TENANTS = _FIRST.union_all(select(_NEXT.scalar_subquery()).where(_FIRST.c.tenant.is_not(None)))

_LEAST = select(func.min(feedback.c.key)).where(feedback.c.tenant == _TENANTS.c.tenant).correlate(_TENANTS)
_LEAST_OF_TENANTS = select(_TENANTS.c.tenant, _LEAST.scalar_subquery().label("key"))
_SOME = _LEAST_OF_TENANTS.where(_TENANTS.c.tenant.is_not(None)).cte("keys", recursive=True)
_GREATER = and_(feedback.c.tenant == _SOME.c.tenant, feedback.c.key > _SOME.c.key)
_NEXT_KEY = select(func.min(feedback.c.key)).where(_GREATER).correlate(_SOME).scalar_subquery()
# The last row of each tenant stands for its feedback without a key.
_KEYS = _SOME.union_all(select(_SOME.c.tenant, _NEXT_KEY).where(_SOME.c.key.is_not(None)))


# As the index is read backwards, also where the key is null: PostgreSQL does not know that all nulls are alike.
_BACKWARDS = (feedback.c.key.desc(), feedback.c.id.desc())


def _newest(same_key: ColumnElement[bool]) -> Any:
    same_tenant = feedback.c.tenant == _KEYS.c.tenant
    newest = select(feedback.c.id).where(same_tenant, same_key).order_by(*_BACKWARDS).limit(1)
    return newest.correlate(_KEYS).scalar_subquery()


_NEWEST = case((_KEYS.c.key.is_(None), _newest(feedback.c.key.is_(None))), else_=_newest(feedback.c.key == _KEYS.c.key))
_NEWEST_OF_KEYS = select(_KEYS.c.tenant, _KEYS.c.key, _NEWEST.label("newest"))


class KeyWithFeedback(NamedTuple):
    """A key of a tenant, None for who has none, and the id of its newest event."""

    tenant: str
    key: str | None
    newest: int


def keys_with_feedback(read: Callable[[Any], Sequence[Any]]) -> list[KeyWithFeedback]:
    """All keys that have given feedback."""
    return [KeyWithFeedback(*row) for row in read(_NEWEST_OF_KEYS) if row.newest is not None]


def newest_of_key(of: KeyWithFeedback, wanted: ColumnElement[bool], count: int) -> Select[Any]:
    """The newest events of a key that are wanted, so many at most, the newest first."""
    same_key = feedback.c.key.is_(None) if of.key is None else feedback.c.key == of.key
    part = (
        select(feedback.c.id)
        .where(feedback.c.tenant == of.tenant, same_key)
        .order_by(*_BACKWARDS)
        .limit(count * _STRETCH)
        .subquery()
    )
    columns = (feedback.c[name] for name in _COLUMNS)
    return (
        select(*columns)
        .join(part, part.c.id == feedback.c.id)
        .order_by(feedback.c.id.desc())
        .where(wanted)
        .limit(count)
    )
