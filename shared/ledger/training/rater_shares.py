"""No rater's word weighs more in a batch than its share: what is beyond it waits for others' feedback.

What a row's reward is made of is shared evenly by those who said it. Feedback without a source, and that of trusted
raters, is the owner's own and not limited; nor is anybody's before there are so many raters that each can have a share.
All names that are used with one key are one rater here.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, select, tuple_, update

from tuneloop.shared.experience import State
from tuneloop.shared.ledger.raters.rater_tables import RaterState, raters
from tuneloop.shared.ledger.raters.reliability import Rater, voice_of
from tuneloop.shared.ledger.raters.standing import rater_of, without_quarantined
from tuneloop.shared.ledger.storage.schema import experiences, feedback
from tuneloop.shared.ledger.storage.transactions import portions
from tuneloop.shared.ledger.training.batch_policy import BatchPolicy

#: So many times the rows of a batch are looked through for others' rows. If that is not enough, what one rater has too
#: many of is dropped, so that others' rows beyond it are found.
WINDOW = 4

#: Why a row is dropped.
REASON = "its rater has more of the waiting feedback than feedback.max_rater_share lets into batches"

_TRAJECTORY = ("tenant", "task_id", "run_id")


class Unit(NamedTuple):
    """Rows that are trained on together, by their ids: a row alone, or a group."""

    number: int
    rows: tuple[int, ...]


def is_limited(connection: Connection, policy: BatchPolicy) -> bool:
    """Whether there are so many raters that each can be held to its share."""
    if policy.max_rater_share >= 1:
        return False
    enough = math.ceil(1 / policy.max_rater_share)
    active = select(raters.c.tenant, raters.c.name).where(raters.c.state == RaterState.ACTIVE, raters.c.name != "")
    return len({(tenant, voice_of(name)) for tenant, name in connection.execute(active)}) >= enough


def within_shares(connection: Connection, units: Sequence[Unit], policy: BatchPolicy, size: int) -> list[Unit]:
    """The first units, of `size` rows at least if there are so many, in which no rater has more than its share.

    A rater may have one unit whatever its size. If there are not enough in a full window, the older half of the others
    is dropped.
    """
    words = _words(connection, [row for unit in units for row in unit.rows])
    most = policy.max_rater_share * size
    had: dict[Rater, float] = defaultdict(float)
    taken: list[Unit] = []
    total = 0
    over: list[Unit] = []
    for unit in units:
        if total >= size:
            return taken
        parts = _parts(words, unit, policy.trusted_raters)
        if any(had[rater] and had[rater] + part > most for rater, part in parts.items()):
            over.append(unit)
            continue
        for rater, part in parts.items():
            had[rater] += part
        taken.append(unit)
        total += len(unit.rows)
    if total < size and sum(len(unit.rows) for unit in units) >= WINDOW * size:
        _drop(connection, [row for unit in over[: (len(over) + 1) // 2] for row in unit.rows])
    return taken


def main_raters(connection: Connection, units: Sequence[Unit], policy: BatchPolicy) -> dict[int, Rater | None]:
    """By the number of each unit, the rater whose word it is most of all; None where it is nobody's who is limited."""
    words = _words(connection, [row for unit in units for row in unit.rows])
    parts = ((unit.number, _parts(words, unit, policy.trusted_raters)) for unit in units)
    return {number: max(found, key=lambda rater: found[rater], default=None) for number, found in parts}


def _parts(words: Mapping[int, Collection[Rater]], unit: Unit, trusted: Collection[str]) -> dict[Rater, float]:
    """How much of a unit is each rater's word, in rows."""
    parts: dict[Rater, float] = defaultdict(float)
    for row in unit.rows:
        by = words.get(row, ())
        for rater in by:
            if rater[1] and rater[1] not in trusted:
                parts[rater[0], voice_of(rater[1])] += 1 / len(by)
    return parts


def _words(connection: Connection, ids: Collection[int]) -> dict[int, set[Rater]]:
    """Who said something that counts of each of the rows."""
    rows = [row for portion in portions(ids) for row in connection.execute(_names_of(portion))]
    by_target: dict[object, set[Rater]] = defaultdict(set)
    for event in without_quarantined(connection, [*_said_of(connection, rows)]):
        by_target[event.msg_id or (event.tenant, event.task_id, event.run_id)].add(rater_of(event))
    return {row.id: by_target[row.msg_id] | by_target[row.tenant, row.task_id, row.run_id] for row in rows}


def _names_of(ids: Collection[int]) -> Any:
    names = (experiences.c[name] for name in ("id", "msg_id", *_TRAJECTORY))
    return select(*names).where(experiences.c.id.in_(ids))


def _said_of(connection: Connection, rows: Collection[Any]) -> Iterator[Any]:
    said = select(*(feedback.c[name] for name in ("msg_id", *_TRAJECTORY, "source"))).distinct()
    for portion in portions({row.msg_id for row in rows}):
        yield from connection.execute(said.where(feedback.c.msg_id.in_(portion)))
    runs = {(row.tenant, row.task_id, row.run_id) for row in rows if None not in (row.task_id, row.run_id)}
    named = tuple_(*(feedback.c[name] for name in _TRAJECTORY))
    for few in portions(runs, of=3):
        yield from connection.execute(said.where(feedback.c.msg_id.is_(None), named.in_(few)))


def _drop(connection: Connection, ids: Collection[int]) -> None:
    for portion in portions(ids):
        dropped = {"state": State.DROPPED, "reason": REASON, "group_id": None}
        connection.execute(update(experiences).where(experiences.c.id.in_(portion)).values(dropped))
