"""Runs: how many replies one got, and what it costs in training."""

from sqlalchemy import ColumnElement, func, select

from tuneloop.shared.ledger.storage.codec import from_blob
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.ledger.storage.transactions import LedgerPart
from tuneloop.shared.ledger.training.merged_calls import CallTokens, RunTokens, count_tokens

_SAMPLED_ORDER = experiences.c.sampled_at, experiences.c.id


class Runs(LedgerPart):
    """What is stored of single runs."""

    def count_calls(self, tenant: str, task_id: str, run_id: str) -> int:
        """The replies that a run got."""
        query = select(func.count(experiences.c.msg_id.distinct()))
        return int(self._read(query.where(*_of_run(tenant, task_id, run_id)))[0][0])

    def count_tokens(self, tenant: str, task_id: str, run_id: str) -> RunTokens:
        """What merging its calls saves; its corrections and purged replies are left out."""
        rows = select(experiences.c.blob).where(*_of_run(tenant, task_id, run_id), experiences.c.correction == 0)
        found = self._read(rows.order_by(*_SAMPLED_ORDER))
        return count_tokens(CallTokens(*from_blob(row.blob)[:2]) for row in found)


def _of_run(tenant: str, task_id: str, run_id: str) -> tuple[ColumnElement[bool], ...]:
    return experiences.c.tenant == tenant, experiences.c.task_id == task_id, experiences.c.run_id == run_id
