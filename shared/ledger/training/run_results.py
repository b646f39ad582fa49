"""Gives the calls of a run without a reward the reward of its last call.

A call takes the reward when its run is gathered, under a rule of its own. It returns the reward if the group breaks up
before training (the result may be retracted), and when a new trainer starts. Order is by request time, since rows
arrive in any order.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, bindparam, func, select, tuple_, update

from tuneloop.shared.experience import State
from tuneloop.shared.ledger.recording.retention import regroup
from tuneloop.shared.ledger.recording.reward_rule import OF_ITS_RESULT, RUN
from tuneloop.shared.ledger.recording.rewards import id_of_rule
from tuneloop.shared.ledger.storage.database import literally, portions
from tuneloop.shared.ledger.storage.schema import COMMITTED, experiences, reward_rules

Run = tuple[str, str, str | None]

_COMMITTED = literally(COMMITTED)
_RECORDED = experiences.c.state == State.RECORDED

#: A repeat of a trained call carries no information about the calls around it.
_RESULT = and_(_COMMITTED, experiences.c.correction == 0)


def waiting_runs(
    connection: Connection, tasks: Collection[tuple[str | None, str | None]], which: ColumnElement[bool]
) -> set[Run]:
    """The runs of the tasks, each a tenant and a task, that have rows which may still be rewarded or committed."""
    named = tuple_(experiences.c.tenant, experiences.c.task_id)
    newest = func.max(experiences.c.sampled_at)
    figures = (
        func.count().filter(experiences.c.state == State.REWARDED).label("rewarded"),
        newest.filter(_RECORDED).label("recorded"),
        newest.filter(_RESULT).label("result"),
    )
    early = experiences.c.state.in_((State.RECORDED, State.REWARDED, State.COMMITTED))
    found: set[Run] = set()
    for portion in portions(tasks, of=2):
        of_these = and_(experiences.c.task_id.is_not(None), named.in_(portion), early, which)
        for row in connection.execute(select(*RUN, *figures).where(of_these).group_by(*RUN)):
            alone = row.result is None or row.run_id is None  # without a name each call is a run
            open_end = row.recorded is not None and (alone or row.recorded >= row.result)
            if row.rewarded or open_end:
                found.add((row.tenant, row.task_id, row.run_id))
    return found


def gather_whole(
    connection: Connection, groups: Collection[Sequence[Any]], which: ColumnElement[bool], *, now: float
) -> None:
    """Make groups of committed rows, and of the calls before them without a reward, as `which` chooses among these."""
    calls: dict[int, list[int]] = defaultdict(list)
    for call, result in _calls_before(connection, [row for rows in groups for row in rows], which):
        calls[result].append(call)
    there = lock_rows(connection, {row.id for rows in groups for row in rows}.union(*calls.values()))
    members: list[Mapping[str, int]] = []
    taken: list[tuple[Any, Any, int]] = []
    for rows in groups:
        committed, recorded = [row.id for row in rows], [call for row in rows for call in calls[row.id]]
        if not (_are(there, committed, State.COMMITTED) and _are(there, recorded, State.RECORDED)):
            continue  # New feedback has changed them since they were found: the next look sees it.
        group_id = min([*committed, *recorded])
        members += [{"its_id": id_, "its_group": group_id} for id_ in committed]
        taken += [(there[call], there[row.id], group_id) for row in rows for call in calls[row.id]]
    if members:
        grouped = update(experiences).where(experiences.c.id == bindparam("its_id"))
        connection.execute(grouped.values(group_id=bindparam("its_group")), members)
    if taken:  # Each call is given the reward of its result, both locked, and committed into the group.
        given = ("reward", "rewarded_at", "committed_at")
        with_results = [
            {"its_id": call.id, "its_group": group_id, **{f"its_{name}": getattr(result, name) for name in given}}
            for call, result, group_id in taken
        ]
        values: dict[str, Any] = {name: bindparam(f"its_{name}") for name in given}
        values |= {"state": State.COMMITTED, "group_id": bindparam("its_group")}
        values["reward_rule"] = id_of_rule(connection, OF_ITS_RESULT, now=now)
        committed_calls = update(experiences).where(experiences.c.id == bindparam("its_id"))
        connection.execute(committed_calls.values(values), with_results)


def without_results(connection: Connection, rows: Sequence[Any]) -> list[Any]:
    """The rows, all committed and in no group, but for those that had their reward from a result: these lose it."""
    rule = _rule(connection)
    if rule is None:
        return list(rows)
    _give_back(connection, [row.id for row in rows if row.reward_rule == rule], rule)
    return [row for row in rows if row.reward_rule != rule]


def give_all_back(connection: Connection) -> None:
    """Take their reward from all that have a result's and are not trained on yet; their groups are gathered again."""
    rule = _rule(connection)
    if rule is None:
        return
    mine = select(experiences.c.id, experiences.c.group_id).where(_COMMITTED, experiences.c.reward_rule == rule)
    rows = connection.execute(mine).all()
    _give_back(connection, [row.id for row in rows], rule)
    regroup(connection, rows)


def _calls_before(connection: Connection, rows: Sequence[Any], which: ColumnElement[bool]) -> Iterator[tuple[int, int]]:
    """The ids of the calls without a reward that came before the last of these rows of their run, and of that one."""
    results: dict[Run, Any] = {}
    for row in rows:
        run = row.tenant, row.task_id, row.run_id
        if None not in run and row.correction == 0 and row.reward is not None:
            results[run] = max(row, results.get(run, row), key=lambda each: (each.sampled_at, each.id))
    for portion in portions(results, of=3):
        query = select(experiences.c.id, *RUN, experiences.c.sampled_at)
        of_these = and_(experiences.c.task_id.is_not(None), tuple_(*RUN).in_(portion), _RECORDED, which)
        for call in connection.execute(query.where(of_these)):
            result = results[call.tenant, call.task_id, call.run_id]
            if call.sampled_at < result.sampled_at:
                yield call.id, result.id


def lock_rows(connection: Connection, ids: Collection[int]) -> dict[int, Any]:
    columns = [experiences.c[name] for name in ("id", "state", "group_id", "reward", "rewarded_at", "committed_at")]
    found: dict[int, Any] = {}
    for portion in portions(sorted(ids)):
        query = select(*columns).where(experiences.c.id.in_(portion)).order_by(experiences.c.id).with_for_update()
        found |= {row.id: row for row in connection.execute(query)}
    return found


def _are(there: Mapping[int, Any], ids: Collection[int], state: State) -> bool:
    return all(id_ in there and there[id_].state == state and there[id_].group_id is None for id_ in ids)


def _give_back(connection: Connection, ids: Collection[int], rule: int) -> None:
    nothing = dict.fromkeys(("reward", "rewarded_at", "reward_rule", "committed_at", "group_id"))
    lock_rows(connection, ids)
    for portion in portions(ids):
        # Feedback on one of them meanwhile has given it a reward of its own.
        still = and_(experiences.c.id.in_(portion), _COMMITTED, experiences.c.reward_rule == rule)
        connection.execute(update(experiences).where(still).values(state=State.RECORDED, **nothing))


def _rule(connection: Connection) -> int | None:
    return connection.execute(select(reward_rules.c.id).where(reward_rules.c.definition == OF_ITS_RESULT)).scalar()
