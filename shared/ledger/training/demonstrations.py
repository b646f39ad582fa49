"""The edited answers of replies, unless they were retracted."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, select, tuple_

from tuneloop.shared.experience import Kind
from tuneloop.shared.ledger.recording.reward_rule import without_quarantined
from tuneloop.shared.ledger.recording.rewards import event_order
from tuneloop.shared.ledger.storage.database import portions
from tuneloop.shared.ledger.storage.schema import feedback

_RUN = ("tenant", "task_id", "run_id")


def demonstrations(connection: Connection, rows: Sequence[Any]) -> dict[int, str]:
    """The latest edited answer of each of these rows of `experiences` that has one, by its id.

    As everywhere, an event without a choice is about all of them, one without a `msg_id` about every reply of its run
    that has no edited answer of its own.
    """
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
    """The edited answers about the rows, and what might take one back."""
    of_these = select(feedback).where(feedback.c.kind.in_((Kind.DEMONSTRATION, Kind.RETRACTION)))
    for portion in portions({row.msg_id for row in rows}):
        yield from connection.execute(of_these.where(feedback.c.msg_id.in_(portion)))
    named = tuple_(*(feedback.c[name] for name in _RUN))
    for few in portions({_run(row) for row in rows if None not in _run(row)}, of=3):
        yield from connection.execute(of_these.where(feedback.c.msg_id.is_(None), named.in_(few)))


def _run(row: Any) -> tuple[str, str | None, str | None]:
    return row.tenant, row.task_id, row.run_id
