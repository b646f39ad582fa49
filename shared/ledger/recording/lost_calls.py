"""Calls of runs that their client never had the end of: cut off, or asked again as no answer reached it.

A run whose last call was cut off has no end that feedback on the run could judge. Of a call that the client's library
asked again, `x-stainless-retry-count` says, the attempt before it is dropped, and shares no reward of its run.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, func, select, tuple_, update

from tuneloop.shared.experience import Exchange, State
from tuneloop.shared.ledger.storage.codec import unpack_text
from tuneloop.shared.ledger.storage.database import is_among, portions
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback

#: Why a row was dropped whose reply has no end, or never reached its client.
_CUT_OFF, RETRIED = "cut_off", "retried"

_RUN = tuple(experiences.c[name] for name in ("tenant", "task_id", "run_id"))
_OF_RUNS = select(*_RUN).where(experiences.c.task_id.is_not(None), is_among(tuple_(*_RUN), "runs")).group_by(*_RUN)
_WHOLE, _NEWEST = func.coalesce(experiences.c.reason, "") != _CUT_OFF, func.max(experiences.c.sampled_at)
_UNFINISHED = _OF_RUNS.having(func.coalesce(_NEWEST.filter(_WHOLE), 0) < _NEWEST)
_WITH_CUT_CALLS = _OF_RUNS.where(~_WHOLE)

#: The newest call of a run before another one.
_BEFORE = (
    select(exchanges.c.msg_id, exchanges.c.endpoint, exchanges.c.request)
    .join(experiences, experiences.c.msg_id == exchanges.c.msg_id)
    .order_by(experiences.c.sampled_at.desc())
    .limit(1)
)
_OPEN = experiences.c.state.in_((State.RECORDED, State.REWARDED))


def unfinished_among(connection: Connection, runs: Collection[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Those of the runs whose last call was cut off; if a call has several choices, all of them."""
    return {tuple(run) for few in portions(runs, of=3) for run in connection.execute(_UNFINISHED, {"runs": few})}


def runs_with_lost_calls(connection: Connection, recorded: Iterable[Exchange]) -> set[tuple[str, str, str]]:
    """Those of the runs of these exchanges with a call that was lost, among them or recorded before."""
    runs, lost = set[tuple[str, str, str]](), set[tuple[str, str, str]]()
    for each in recorded:
        if each.task_id is not None and each.run_id is not None:
            is_lost = each.is_retry or any(choice.drop_reason == _CUT_OFF for choice in each.experiences)
            (lost if is_lost else runs).add((each.tenant, each.task_id, each.run_id))
    return lost | {
        (tenant, task_id, run_id)
        for few in portions(runs - lost, of=3)
        for tenant, task_id, run_id in connection.execute(_WITH_CUT_CALLS, {"runs": few})
    }


def drop_retried(connection: Connection, recorded: Sequence[Exchange]) -> None:
    """Drop what these calls are asked again of: the call of their run before them, if its request is the same.

    One about which something was said has reached its client. Without a run there is no reward to share.
    """
    for each in recorded:
        if not each.is_retry or each.task_id is None or each.run_id is None:
            continue
        mine = _RUN[0] == each.tenant, _RUN[1] == each.task_id, _RUN[2] == each.run_id
        earlier = _BEFORE.where(*mine, experiences.c.sampled_at < each.received_at)
        for msg_id in _same(connection.execute(earlier), each):
            said = select(feedback.c.id).where(feedback.c.msg_id == msg_id).exists()
            which = experiences.c.msg_id == msg_id, _OPEN, ~said
            connection.execute(update(experiences).where(*which).values(state=State.DROPPED, reason=RETRIED))


def _same(rows: Iterable[Any], exchange: Exchange) -> Iterator[str]:
    for row in rows:
        if row.endpoint == exchange.endpoint and unpack_text(row.request) == exchange.request:
            yield row.msg_id
