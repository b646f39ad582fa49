"""Commits rewarded rows for `buffer.commit: auto`; all its state is in the ledger.

A row is due QUIET_S after the last feedback about it or its run, and at most AT_LATEST_S after the first. A group
commits together: a run, a task's runs, or both replies of a preference. It waits until no reply lacks feedback, or
until `group_timeout` after the first feedback.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, exists, func, or_, select, tuple_, update

from tuneloop.shared.experience import State
from tuneloop.shared.ledger.recording.rewards import TRAJECTORY, RewardsPart
from tuneloop.shared.ledger.storage.database import literally, portions
from tuneloop.shared.ledger.storage.schema import REWARDED, experiences, feedback
from tuneloop.shared.ledger.training.groups import (
    COLUMNS,
    BatchRules,
    Key,
    connected_sets,
    ends_of,
    key_of,
    run_of,
    standing_preferences,
    takable,
)

#: Seconds after the last feedback about a row, and at most after the first.
QUIET_S, AT_LATEST_S = 30.0, 300.0

PAGE = 1000

_REWARDED = literally(REWARDED)
#: No comparison of the column itself: SQLite would read all rows in these states, and not those of a run.
_STATE = func.coalesce(experiences.c.state, "")
_UNGROUPED = or_(
    _STATE.in_((State.RECORDED, State.REWARDED)),
    and_(_STATE == State.COMMITTED, experiences.c.group_id.is_(None)),
)

Place = tuple[float, int]

_Group = Sequence[Any]


class CommitScan(NamedTuple):
    """How many rows were committed, and where the next look begins; None: there is no more."""

    committed: int
    place: Place | None


def due_at(events: Iterable[float], rewarded_at: float) -> float:
    """When a row is due by itself, of the times of the feedback about it and its run.

    >>> due_at([100.0, 110.0], 110.0), due_at([100.0, 395.0], 395.0), due_at([], 50.0)
    (140.0, 400.0, 80.0)
    """
    times = [*events, rewarded_at]
    return min(max(times) + QUIET_S, min(times) + AT_LATEST_S)


class AutomaticCommit(RewardsPart):
    def is_due(self, policies: Collection[int]) -> bool:
        """Whether a row of these policies may be due, or gets the default reward; changes nothing."""
        now = self._clock()
        quiet = experiences.c.rewarded_at <= now - QUIET_S
        wanted = [exists().where(_REWARDED, experiences.c.policy == each, quiet) for each in policies]
        # Feedback that goes on and on keeps rows from being quiet.
        restless = [exists().where(_REWARDED, experiences.c.policy == each, _restless(now)) for each in policies]
        window = self._rewards.rule.attribution_window
        if self._rewards.rule.default is not None and window is not None:
            closed = experiences.c.state == State.RECORDED, experiences.c.sampled_at < now - window
            wanted.append(exists().where(*closed))
        return any(self._read(select(each))[0][0] for each in (*wanted, *restless))

    def reward_by_default(self) -> int:
        with self._write() as connection:
            if (rewarding := self._rewards.by_default(connection)) is None:
                return 0
            closed, values = rewarding
            page = select(experiences.c.id).where(closed).order_by(experiences.c.sampled_at).limit(PAGE)
            those = update(experiences).where(experiences.c.id.in_(page), closed)
            return connection.execute(those.values(values)).rowcount

    def commit_due(self, rules: BatchRules, after: Place | None = None) -> CommitScan:
        """Commit a policy's due rows: at most PAGE rows after that position, with their groups."""
        with self._write() as connection:
            now = self._clock()
            place = tuple_(experiences.c.rewarded_at, experiences.c.id)
            query = select(*COLUMNS).where(_REWARDED, experiences.c.policy == rules.policy, _due(now))
            if after is not None:
                query = query.where(place > after)
            order = experiences.c.rewarded_at, experiences.c.id
            page = connection.execute(query.order_by(*order).limit(PAGE)).all()
            last = (page[-1].rewarded_at, page[-1].id) if len(page) == PAGE else None
            if rules.group_by == "none":
                due = [row.id for row in page]
            elif rules.group_by == "preference":
                due = [id_ for group in _find_preference_groups(connection, page, rules, now) for id_ in group]
            else:
                due = [row.id for group in _find_named_groups(connection, page, rules, now) for row in group]
            committed = 0
            for portion in portions(sorted({*due})):
                those = update(experiences).where(experiences.c.id.in_(portion), _REWARDED)
                committed += connection.execute(those.values(state=State.COMMITTED, committed_at=now)).rowcount
            return CommitScan(committed, last)


def _has_event(when: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whether feedback about a row, against it, or about its run, is of such a time."""
    own = feedback.c.msg_id == experiences.c.msg_id
    against = feedback.c.other_msg_id == experiences.c.msg_id
    named = (feedback.c[name] == experiences.c[name] for name in ("tenant", "task_id", "run_id"))
    of_run = and_(feedback.c.msg_id.is_(None), *named)
    return or_(*(exists().where(about, when).correlate(experiences) for about in (own, against, of_run)))


def _restless(now: float) -> ColumnElement[bool]:
    """Whether a row is not quiet, and the first feedback about it is AT_LATEST_S old. No feedback precedes a reply."""
    may_be = experiences.c.rewarded_at > now - QUIET_S, experiences.c.sampled_at <= now - AT_LATEST_S
    return and_(*may_be, _has_event(feedback.c.received_at <= now - AT_LATEST_S))


def _due(now: float) -> ColumnElement[bool]:
    since = now - QUIET_S
    lately = _has_event(or_(feedback.c.received_at > since, feedback.c.repeated_at > since))
    long_ago = _has_event(feedback.c.received_at <= now - AT_LATEST_S)
    quiet = and_(experiences.c.rewarded_at <= since, or_(~lately, long_ago))
    return or_(quiet, _restless(now))


def _due_and_timed_out(
    connection: Connection, ids: Collection[int], rules: BatchRules, now: float
) -> tuple[set[int], set[int]]:
    """Those of the rewarded rows that are due by themselves, and those whose first feedback is `group_timeout` old."""
    until = now - rules.group_timeout
    late = or_(experiences.c.rewarded_at <= until, _has_event(feedback.c.received_at <= until))
    due, timed_out = set[int](), set[int]()
    for portion in portions(ids):
        columns = experiences.c.id, _due(now).label("due"), late.label("late")
        rows = connection.execute(select(*columns).where(experiences.c.id.in_(portion), _STATE == State.REWARDED))
        for row in rows:
            due |= {row.id} if row.due else set()
            timed_out |= {row.id} if row.late else set()
    return due, timed_out


def _find_named_groups(connection: Connection, page: Sequence[Any], rules: BatchRules, now: float) -> Iterator[_Group]:
    """The groups of `group_by` run and task, begun in a page, that may go: complete or timed out."""

    found = [row for row in page if row.task_id is None]  # the choices of one reply
    ones: dict[tuple[str, ...], dict[Key, int]] = {}
    for row in page:
        if row.task_id is not None:
            names: tuple[str, ...] = ("msg_id",) if row.run_id is None else TRAJECTORY
            names = TRAJECTORY[:2] if rules.group_by == "task" else names
            ones.setdefault(names, {}).setdefault(key_of(row, rules), row.id)
    # By one row of each group, so that its others are found in an index: for a list of names SQLite reads all rows.
    for group, begun in ones.items():
        for few in portions([*begun.values()]):
            columns = (experiences.c[name].label(f"its_{name}") for name in group)
            its = select(*columns).where(experiences.c.id.in_(few)).subquery("begun")
            same = and_(*(experiences.c[name] == its.c[f"its_{name}"] for name in group))
            taken = experiences.c.task_id.is_not(None), _UNGROUPED, takable(rules)
            found += connection.execute(select(*COLUMNS).join_from(its, experiences, same).where(*taken))
    groups: dict[Key, list[Any]] = defaultdict(list)
    for row in found:
        groups[key_of(row, rules)].append(row)
    grouped = {row.id for row in found}
    yield [row for row in page if row.id not in grouped]  # no batch takes them: they wait for nothing
    rewarded = {row.id for rows in groups.values() for row in rows if row.state == State.REWARDED}
    due, timed_out = _due_and_timed_out(connection, rewarded, rules, now)
    for rows in groups.values():
        mine = [row for row in rows if row.state == State.REWARDED]
        ids = {row.id for row in mine}
        enough = rules.group_size if rules.group_by == "task" and rows[0].task_id is not None else 1
        runs_there = {run_of(row) for row in rows if row.state != State.RECORDED}
        is_complete = len(runs_there) >= enough and not _has_open_end(rows, rules)
        if (is_complete and ids <= due) or ids & timed_out:
            yield mine


def _has_open_end(rows: Sequence[Any], rules: BatchRules) -> bool:
    """Whether a reply of a group waits for feedback. One before the result of its run does not, where that counts."""
    if not rules.by_result:
        return any(row.state == State.RECORDED for row in rows)
    results: dict[str, float] = {}
    for row in rows:
        if row.state != State.RECORDED and row.correction == 0:
            results[run_of(row)] = max(row.sampled_at, results.get(run_of(row), row.sampled_at))
    waiting = (row for row in rows if row.state == State.RECORDED)
    return any(row.run_id is None or row.sampled_at >= results.get(run_of(row), 0.0) for row in waiting)


def _find_preference_groups(
    connection: Connection, page: Sequence[Any], rules: BatchRules, now: float
) -> Iterator[Collection[int]]:
    """What preferences connect, begun in a page, that may go: both replies have their rewards, or timed out."""
    pairs = list(ends_of(connection, standing_preferences(connection, {row.msg_id for row in page})))
    mine = {row.id for row in page}
    of_policy = [[[row for row in end if row.policy == rules.policy] for end in pair] for pair in pairs]
    ids = mine | {row.id for pair in of_policy for end in pair for row in end if row.state == State.REWARDED}
    due, timed_out = _due_and_timed_out(connection, ids, rules, now)
    links, waiting = [], ids - due
    for pair in of_policy:
        rewarded = [row.id for end in pair for row in end if row.id in ids]
        links.append(rewarded)
        # Either reply may not be recorded yet, or wait for its own reward.
        if any(not end or any(row.state == State.RECORDED for row in end) for end in pair):
            waiting |= {*rewarded}
    for group in connected_sets(ids, [link for link in links if link]):
        if waiting.isdisjoint(group) or timed_out & group:
            yield group
