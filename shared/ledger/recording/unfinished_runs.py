"""Runs with calls that were cut off: one whose last call was has no end that feedback on the run could judge."""

from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import Connection, func, select, tuple_

from tuneloop.shared.experience import Exchange
from tuneloop.shared.ledger.storage.database import is_among, portions
from tuneloop.shared.ledger.storage.schema import experiences

#: Why a row was dropped whose reply has no end.
_CUT_OFF = "cut_off"

_RUN = tuple(experiences.c[name] for name in ("tenant", "task_id", "run_id"))
_OF_RUNS = select(*_RUN).where(experiences.c.task_id.is_not(None), is_among(tuple_(*_RUN), "runs")).group_by(*_RUN)
_WHOLE, _NEWEST = func.coalesce(experiences.c.reason, "") != _CUT_OFF, func.max(experiences.c.sampled_at)
_UNFINISHED = _OF_RUNS.having(func.coalesce(_NEWEST.filter(_WHOLE), 0) < _NEWEST)
_WITH_CUT_CALLS = _OF_RUNS.where(~_WHOLE)


def unfinished_among(connection: Connection, runs: Collection[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Those of the runs whose last call was cut off; if a call has several choices, all of them."""
    return {tuple(run) for few in portions(runs, of=3) for run in connection.execute(_UNFINISHED, {"runs": few})}


def runs_with_cut_calls(connection: Connection, exchanges: Iterable[Exchange]) -> set[tuple[str, str, str]]:
    """Those of the runs of these exchanges with a call that was cut off, among them or recorded before."""
    runs, cut = set[tuple[str, str, str]](), set[tuple[str, str, str]]()
    for each in exchanges:
        if each.task_id is not None and each.run_id is not None:
            run = each.tenant, each.task_id, each.run_id
            (cut if any(choice.drop_reason == _CUT_OFF for choice in each.experiences) else runs).add(run)
    return cut | {
        (tenant, task_id, run_id)
        for few in portions(runs - cut, of=3)
        for tenant, task_id, run_id in connection.execute(_WITH_CUT_CALLS, {"runs": few})
    }
