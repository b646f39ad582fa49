"""Runs that are judged by their last call: the calls before it, of which nothing was said, are trained on with it.

Such a call takes the result's reward when its run is gathered, under a rule of its own. It gives it back if the group
falls apart before it is trained on, for then the result may have been retracted.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, bindparam, exists, select, tuple_, update

from shared.experience import State
from shared.ledger_rules import OF_ITS_RESULT, id_of_rule
from shared.ledger_transactions import portions
from shared.schema import experiences, reward_rules

_RUN = tuple(experiences.c[name] for name in ("tenant", "task_id", "run_id"))
_RECORDED = experiences.c.state == State.RECORDED


def has_a_result() -> ColumnElement[bool]:
    """Whether nothing was said of a call, and a later one of its run is committed."""
    later = experiences.alias()
    of_its_run = (later.c[column.name] == column for column in _RUN)
    result = exists().where(later.c.state == State.COMMITTED, later.c.id > experiences.c.id, *of_its_run)
    return and_(_RECORDED, result)


def calls_before(connection: Connection, rows: Sequence[Any], which: ColumnElement[bool]) -> Iterator[tuple[int, int]]:
    """For each call of which nothing was said and which came before one of the committed rows of its run: the ids of
    both, where it is such as `which` says.
    """
    results: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.task_id is not None and row.run_id is not None:
            run = row.tenant, row.task_id, row.run_id
            results[run] = max(row.id, results.get(run, 0))
    for portion in portions(results, of=3):
        query = select(experiences.c.id, *_RUN).where(experiences.c.task_id.is_not(None), tuple_(*_RUN).in_(portion))
        for row in connection.execute(query.where(_RECORDED, which)):
            result = results[row.tenant, row.task_id, row.run_id]
            if row.id < result:
                yield row.id, result


def commit_with_result(
    connection: Connection, calls: Collection[tuple[int, int]], *, group_id: int, now: float
) -> None:
    """Give each call the reward of its result, and commit it into the group."""
    if not calls:
        return
    rule = id_of_rule(connection, OF_ITS_RESULT, now=now)
    columns = (experiences.c[name] for name in ("id", "reward", "rewarded_at", "committed_at"))
    results: dict[int, Any] = {}
    for portion in portions({result for _, result in calls}):
        wanted = select(*columns).where(experiences.c.id.in_(portion))
        results |= {row.id: row for row in connection.execute(wanted)}
    taken = update(experiences).where(experiences.c.id == bindparam("its_id"), _RECORDED)
    values = {"state": State.COMMITTED, "reward_rule": rule, "group_id": group_id}
    given: dict[str, Any] = {name: bindparam(f"its_{name}") for name in ("reward", "rewarded_at", "committed_at")}
    rows = [
        {"its_id": id_, **{f"its_{name}": getattr(results[result], name) for name in given}} for id_, result in calls
    ]
    connection.execute(taken.values(**values, **given), rows)


def without_results(connection: Connection, rows: Sequence[Any]) -> list[Any]:
    """The rows, all committed and in no group, but for those that had their reward from a result: these lose it."""
    rule = connection.execute(select(reward_rules.c.id).where(reward_rules.c.definition == OF_ITS_RESULT)).scalar()
    if rule is None:
        return list(rows)
    nothing = dict.fromkeys(("reward", "rewarded_at", "reward_rule", "committed_at"))
    for portion in portions([row.id for row in rows if row.reward_rule == rule]):
        mine = and_(experiences.c.id.in_(portion), experiences.c.state == State.COMMITTED)
        connection.execute(update(experiences).where(mine).values(state=State.RECORDED, **nothing))
    return [row for row in rows if row.reward_rule != rule]
