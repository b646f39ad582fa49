"""Who waits for whom among those that record on PostgreSQL: who records something about the same replies or runs.

Of two that decide one reward the later must see what the earlier heard. Rows of `experiences` are locked for feedback
about replies that are there. Advisory locks stand for what has no row: for runs, and, in few stripes, for replies that
come in at the same time as feedback about them. Exchanges share theirs, so that only feedback waits.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple
from zlib import crc32

from sqlalchemy import Connection, or_, select, union

from tuneloop.shared.errors import Deadlock
from tuneloop.shared.experience import Exchange, Feedback, Kind, Record
from tuneloop.shared.ledger.recording.retention import names_in
from tuneloop.shared.ledger.recording.rewards import TRAJECTORY, replies_of, replies_preferred_to
from tuneloop.shared.ledger.storage.database import Utf8Text, alone, alone_each, is_among, portions
from tuneloop.shared.ledger.storage.schema import experiences, feedback

#: A server has room for some thousands of locks in all, and a group may bring hundreds of replies.
_STRIPES = 1024

_THERE = select(experiences.c.msg_id).distinct().where(is_among(experiences.c.msg_id, "replies"))
_ROWS = select(experiences.c.id).where(is_among(experiences.c.msg_id, "replies"))
_LOCKED_ROWS = _ROWS.order_by(experiences.c.id).with_for_update()
_LABELS = union(
    *(
        select(table.c.msg_id, *(table.c[name] for name in TRAJECTORY)).where(
            is_among(table.c.msg_id, "replies"), or_(table.c.task_id.is_not(None), table.c.run_id.is_not(None))
        )
        for table in (experiences, feedback)
    )
)


class _Subjects(NamedTuple):
    """The replies with rows that feedback bears on, and the advisory locks to hold alone and to share.

    `read`: whether what others record meanwhile may add to them.
    """

    rows: set[str]
    own: set[int]
    shared: set[int]
    read: bool

    def are_within(self, before: "_Subjects") -> bool:
        """Whether none has come since then."""
        return self.rows <= before.rows and self.own <= before.own and self.shared <= before.own | before.shared


def wait_for_others(connection: Connection, records: Sequence[Record]) -> None:
    """Until this transaction ends, let nobody else record what may decide the same rewards.

    Raises Deadlock if others made the records bear on more meanwhile: who adds locks to those held may wait for ever.
    """
    if connection.dialect.name != "postgresql":
        return
    alone(connection, "record", shared=True)
    wanted = _subjects(connection, records)
    alone_each(connection, "record", wanted.own, shared=wanted.shared)
    for portion in portions(sorted(wanted.rows)):
        connection.execute(_LOCKED_ROWS, {"replies": portion})
    if wanted.read and not _subjects(connection, records).are_within(wanted):
        raise Deadlock("others have recorded of the same runs or preferences meanwhile")


def _subjects(connection: Connection, records: Sequence[Record]) -> _Subjects:
    brought = {each.msg_id for each in records if isinstance(each, Exchange)}
    heard = [each for each in records if isinstance(each, Feedback)]
    whole_runs = {(each.tenant, each.task_id or "", each.run_id or "") for each in heard if each.msg_id is None}
    retracted = {each.msg_id for each in heard if each.kind is Kind.RETRACTION and each.msg_id is not None}
    named = {name for each in heard for name in names_in(each)} | {*replies_preferred_to(connection, retracted)}
    rows = {name for some in portions(named) for name in connection.execute(_THERE, {"replies": some}).scalars()}
    # Runs whose calls the replies are, or may become by labels that feedback gives them.
    labels: list[tuple[str | None, ...]] = [
        (each.msg_id, each.tenant, each.task_id, each.run_id)
        for each in records
        if isinstance(each, Exchange) or (each.msg_id and (each.task_id or each.run_id) is not None)
    ]
    open_ = {name for name, _, *given in labels if name is not None and (None in given or name not in brought)}
    for some in portions(open_):
        labels += [tuple(row) for row in connection.execute(_LABELS, {"replies": some})]
    tasks, runs = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for name, _, task_id, run_id in labels:
        for of, label in ((tasks, task_id), (runs, run_id)):
            of[name or ""] |= {label} if label is not None else set()
    joined = {(tenant, *run) for name, tenant, *_ in labels for run in product(tasks[name or ""], runs[name or ""])}
    own = {_number("run", *run) for run in whole_runs} | {_stripe(name) for name in named - rows - brought}
    shared = {_stripe(name) for name in brought} | {_number("run", tenant or "", *run) for tenant, *run in joined}
    read = bool(retracted or whole_runs or open_)
    return _Subjects(rows | {*replies_of(connection, whole_runs)}, own, shared - own, read)


def _stripe(msg_id: str) -> int:
    return _number("reply", str(crc32(msg_id.encode()) % _STRIPES))


def _number(*names: str) -> int:
    return crc32(Utf8Text.storable("/".join(names)).encode()) - (1 << 31)
