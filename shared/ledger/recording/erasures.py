"""Whose rows were deleted, and which must not come back: they may still lie in a spool when they are deleted.

What is read or decided here runs inside a transaction of the ledger.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, delete, or_, select, tuple_

from tuneloop.shared.experience import Exchange, Feedback, Record, person_behind
from tuneloop.shared.ledger.rare_rows import RareRows
from tuneloop.shared.ledger.storage.schema import deletions, erasures, feedback
from tuneloop.shared.ledger.storage.schema_types import Words
from tuneloop.shared.ledger.storage.transactions import is_among, portions, put

#: A tenant and the name of a person there.
Person = tuple[str, str]


_ERASED = select(erasures).where(is_among(tuple_(erasures.c.tenant, erasures.c.user_id), "people"))


def without_erased(
    records: Iterable[Record],
    erased: Mapping[Person, float],
    *,
    deleted: Iterable[str] = (),
    hidden: Callable[[str], str] = lambda name: name,
) -> Iterator[Record]:
    """The records but those of an erased person that were received before that: exchanges, and feedback by them.

    Feedback about such an exchange goes too, where the exchange comes before it, or is among the `deleted`. `hidden` is
    what else a person of a name may be called among the erased.
    """
    gone = set(deleted)

    def are_of_erased(record: Record, name: str | None) -> bool:
        names = {name, hidden(name)} if name is not None else ()
        return any(
            (record.received_at <= erased.get((record.tenant, stored_name(each)), float("-inf"))) for each in names
        )

    for record in records:
        if isinstance(record, Exchange):
            theirs = record.msg_id in gone or are_of_erased(record, record.user)
            gone.update([record.msg_id] if theirs else [])
        else:
            about = names_in(record) & gone
            said_by = record.source and person_behind(record.source)
            theirs = bool(about) or are_of_erased(record, said_by)
        if not theirs:
            yield record


def not_erased(
    connection: Connection, rare: RareRows, new_exchanges: Sequence[Exchange], new_feedback: Sequence[Feedback]
) -> tuple[list[Exchange], list[Feedback]]:
    """The exchanges and the feedback that may be stored. Earlier feedback about one that may not is deleted."""
    if rare.deletions:
        new_exchanges, new_feedback = _not_deleted(connection, new_exchanges, new_feedback)
    if not rare.erasures:
        return list(new_exchanges), list(new_feedback)
    people = [(each.tenant, each.user) for each in new_exchanges] + [
        (each.tenant, each.source and person_behind(each.source)) for each in new_feedback
    ]
    named = {(tenant, stored_name(name)) for tenant, name in people if name is not None}
    erased = erased_among(connection, named)
    if not erased:
        return list(new_exchanges), list(new_feedback)
    remaining = list(without_erased([*new_exchanges, *new_feedback], erased))
    remaining_exchanges = [each for each in remaining if isinstance(each, Exchange)]
    left = {each.msg_id for each in remaining_exchanges}
    refused = [each for each in new_exchanges if each.msg_id not in left]
    forget_feedback(connection, {each.msg_id for each in refused})
    mark_deleted(connection, refused, at=max(erased.values()))
    return remaining_exchanges, [each for each in remaining if isinstance(each, Feedback)]


def deleted_of(msg_ids: Sequence[str]) -> Select[tuple[str]]:
    """Those that were deleted one by one; a portion of names at a time."""
    return select(deletions.c.msg_id).where(deletions.c.msg_id.in_(msg_ids))


def erased_among(connection: Connection, people: Collection[Person]) -> dict[Person, float]:
    """When those of the people were erased who were."""
    found: dict[Person, float] = {}
    for portion in portions(people, of=2):
        for row in connection.execute(_ERASED, {"people": portion}):
            found[row.tenant, row.user_id] = row.erased_at
    return found


def forget_feedback(connection: Connection, msg_ids: Collection[str]) -> None:
    """Delete the feedback about these replies."""
    for portion in portions(msg_ids):
        about = or_(feedback.c.msg_id.in_(portion), feedback.c.other_msg_id.in_(portion))
        connection.execute(delete(feedback).where(about))


def mark_deleted(connection: Connection, rows: Iterable[Any], *, at: float) -> None:
    """Note that these exchanges were deleted: feedback about them, which may come later, is not taken."""
    names = ("msg_id", "tenant", "received_at")
    put(connection, deletions, [{name: getattr(each, name) for name in names} | {"deleted_at": at} for each in rows])


def stored_name(name: str) -> str:
    """The name of a person as the ledger holds it."""
    return Words.storable(name)


def _not_deleted(
    connection: Connection, new_exchanges: Sequence[Exchange], new_feedback: Sequence[Feedback]
) -> tuple[Sequence[Exchange], Sequence[Feedback]]:
    """Those that are neither a deleted completion nor about one."""
    named = {each.msg_id for each in new_exchanges} | {msg_id for each in new_feedback for msg_id in names_in(each)}
    deleted = {row.msg_id for portion in portions(named) for row in connection.execute(deleted_of(portion))}
    if not deleted:
        return new_exchanges, new_feedback
    return (
        [each for each in new_exchanges if each.msg_id not in deleted],
        [each for each in new_feedback if not deleted & names_in(each)],
    )


def names_in(record: Record) -> set[str]:
    """The replies that a record names."""
    if isinstance(record, Exchange):
        return {record.msg_id}
    return {msg_id for msg_id in (record.msg_id, record.other_msg_id) if msg_id is not None}
