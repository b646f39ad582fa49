"""Which rows there are at all that most ledgers have none of: one query, in the place of one for each kind."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Executable, bindparam, exists, literal_column, select

from tuneloop.shared.ledger.storage.schema import deletions, erasures, feedback, mismatches


class RareRows(NamedTuple):
    """Whether there are any. What is recorded is looked for among those that there are."""

    deletions: bool
    erasures: bool
    mismatches: bool
    pending: bool  # feedback that waits for its reply
    preferences: bool  # feedback about two replies
    of_runs: bool  # feedback about whole runs


_KINDS: Sequence[ColumnElement[bool]] = (
    *(exists().select_from(table) for table in (deletions, erasures, mismatches)),
    exists().where(literal_column("outcome = 'pending'"), feedback.c.id > 0),  # the latter has the index used
    exists().where(feedback.c.other_msg_id.is_not(None)),
    exists().where(feedback.c.msg_id.is_(None)),
)

#: What reads them: one row.
RARE_ROWS: Executable = select(*_KINDS)

#: Whether `its_tenant` has feedback about a reply that waits for it, and whether any reply was preferred to another.
ANY_EARLY: Executable = select(
    exists().where(
        literal_column("outcome = 'pending' AND msg_id IS NOT NULL"), feedback.c.tenant == bindparam("its_tenant")
    ),
    exists().where(feedback.c.other_msg_id.is_not(None)),
)
