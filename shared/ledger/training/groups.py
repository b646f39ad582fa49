"""Groups committed rows that are trained on together: the calls of a run, the runs of a task, a preference's replies.

Runs inside a transaction of the ledger, under the trainer's epoch. `group_id` is the smallest id of the group's rows. A
group forms when it is complete, or partial `group_timeout` seconds after its first commit. A single row expires then.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from sqlalchemy import ColumnElement, Connection, and_, func, select, text, true, tuple_, update

from tuneloop.shared.experience import Int32s, State, TrustedRaters
from tuneloop.shared.ledger.recording.reward_rule import without_quarantined
from tuneloop.shared.ledger.recording.rewards import event_order, retracted_preferences, retractions
from tuneloop.shared.ledger.storage.codec import from_blob, unpack_text
from tuneloop.shared.ledger.storage.database import LedgerPart, find, literally, portions
from tuneloop.shared.ledger.storage.schema import COMMITTED, EDITED, exchanges, experiences, feedback, versions
from tuneloop.shared.ledger.training.run_results import gather_whole, lock_rows, waiting_runs, without_results
from tuneloop.shared.ledger.versions.versions import SERVABLE
from tuneloop.shared.settings.settings import Settings


class BatchRules(NamedTuple):
    """How batches of one `policy`, by its id, are taken. `max_staleness` is in its versions, both timeouts in seconds.

    A group of `group_by: task` has `group_size` runs, after its timeout at least `least_runs`. `any_reply` includes
    replies that are not samples of the policy, `edited` those edited and not rated. `by_result`: a run's last call
    gives the reward of the calls before it. `max_rater_share`: the largest part of a batch from one rater.
    `max_backlog`: committed experiences kept at a registration. `automatic`: groups time out by their rewards, since
    rows are committed as soon as possible.
    """

    policy: int = 0
    order: str = "oldest"
    group_by: str = "none"
    group_size: int = 8
    least_runs: int = 2
    group_timeout: float = 3600.0
    batch_timeout: float | None = None
    max_staleness: int | None = None
    any_reply: bool = False
    edited: bool = False
    by_result: bool = False
    max_rater_share: float = 1.0
    max_backlog: int | None = None
    automatic: bool = False
    trusted_raters: TrustedRaters = TrustedRaters()

    @classmethod
    def of(cls, settings: Settings, policy: int = 0) -> Self:
        buffer, trainer = settings.buffer, settings.trainer
        return cls(
            policy=policy,
            order=buffer.order,
            group_by=buffer.group_by,
            group_size=buffer.group_size,
            least_runs=buffer.group_size if buffer.whole_groups_only else 2,
            group_timeout=buffer.group_timeout,
            batch_timeout=buffer.batch_timeout,
            max_staleness=trainer.max_staleness,
            any_reply=settings.algorithm.of_any_reply,
            edited=settings.algorithm.of_edited_answers,
            by_result=settings.algorithm.by_result,
            max_rater_share=settings.feedback.max_rater_share,
            max_backlog=buffer.max_backlog and buffer.max_backlog * buffer.train_batch_size,
            automatic=buffer.commit == "auto",
            trusted_raters=settings.feedback.all_trusted(settings.judge),
        )


class _Call(Protocol):
    @property
    def prompt_ids(self) -> Int32s: ...

    @property
    def completion_ids(self) -> Int32s: ...


class CallTokens(NamedTuple):
    prompt_ids: Int32s
    completion_ids: Int32s


class RunTokens(NamedTuple):
    calls: int
    tokens: int
    completion_tokens: int
    sequences: int
    merged_tokens: int


C = TypeVar("C", bound=_Call)


def merge_calls(calls: Iterable[C]) -> list[list[C]]:
    """The sequences of a run's calls: a call continues the longest whose tokens begin its prompt."""
    sequences: list[list[C]] = []
    histories: list[Int32s] = []
    for call in sorted(calls, key=lambda each: len(each.prompt_ids)):
        fitting = [
            at
            for at, history in enumerate(histories)
            if (len(call.prompt_ids) >= len(history) and np.array_equal(call.prompt_ids[: len(history)], history))
        ]
        whole = np.concatenate([call.prompt_ids, call.completion_ids])
        if fitting:
            longest = max(fitting, key=lambda at: len(histories[at]))
            sequences[longest].append(call)
            histories[longest] = whole
        else:
            sequences.append([call])
            histories.append(whole)
    return sequences


def count_tokens(calls: Iterable[_Call]) -> RunTokens:
    sequences = merge_calls(calls)
    merged = [call for sequence in sequences for call in sequence]
    return RunTokens(
        calls=len(merged),
        tokens=sum(map(_length, merged)),
        completion_tokens=sum(len(call.completion_ids) for call in merged),
        sequences=len(sequences),
        merged_tokens=sum(_length(sequence[-1]) for sequence in sequences),
    )


def _length(call: _Call) -> int:
    return len(call.prompt_ids) + len(call.completion_ids)


#: So many tokens into a reply its reasoning begins, behind what opens it.
_REASONING_BEGINS = 2

#: So many calls before one are compared with it, and so many sentences are given of a run.
_COMPARED, _MOST_BREAKS = 32, 20


class _Asked(NamedTuple):
    """A call with the turns that it was asked with, none where they cannot be read."""

    prompt_ids: Int32s
    completion_ids: Int32s
    turns: Sequence[Any]

    @property
    def whole(self) -> Int32s:
        return np.concatenate([self.prompt_ids, self.completion_ids])


def find_breaks(calls: Sequence[_Asked]) -> Iterator[str]:
    """Why calls of a run, as sampled, do not continue those before them; each is compared with the most alike one."""

    def in_common(one: Int32s, other: Int32s) -> int:
        size = min(len(one), len(other))
        differs = one[:size] != other[:size]
        return int(differs.argmax()) if differs.any() else size

    for at, call in enumerate(calls[1:], start=1):
        shared = {n: in_common(call.prompt_ids, calls[n].whole) for n in range(max(0, at - _COMPARED), at)}
        nearest = max(shared, key=lambda n: (shared[n], n))
        before, count = calls[nearest], shared[nearest]
        prompt, name = len(before.prompt_ids), f"turn {nearest + 1}"
        turn = call.turns[len(before.turns)] if len(call.turns) > len(before.turns) > 0 else None
        turn = turn if isinstance(turn, dict) and turn.get("role") == "assistant" else {}
        parts = turn["content"] if isinstance(turn.get("content"), list) else ()
        thinks = any(isinstance(part, dict) and "thinking" in str(part.get("type")) for part in parts)
        lacks_reasoning = bool(turn) and not (thinks or turn.get("reasoning") or turn.get("reasoning_content"))
        if count == len(before.whole):
            continue
        if count == prompt == len(call.prompt_ids):
            yield f"turn {at + 1} asks the same as {name}"
        elif count < prompt:
            told = f"turn {at + 1} leaves the prompt of {name} at its token {count + 1} of {prompt}"
            yield f"{told}: other instructions or tools, an edited history, or a template that drops earlier reasoning"
        elif count - prompt <= _REASONING_BEGINS and lacks_reasoning:
            yield f"turn {at + 1} lacks the reasoning of {name}: send its assistant turn back with `reasoning`"
        else:
            told = f"turn {at + 1} has the reply of {name} otherwise, from token {count - prompt + 1} on"
            yield f"{told}: it was edited, or the template writes it otherwise"


_SAMPLED_ORDER = experiences.c.sampled_at, experiences.c.id


class Runs(LedgerPart):
    def count_calls(self, tenant: str, task_id: str, run_id: str) -> int:
        query = select(func.count(experiences.c.msg_id.distinct()))
        return int(self._read(query.where(*_of_run(tenant, task_id, run_id)))[0][0])

    def count_tokens(self, tenant: str, task_id: str, run_id: str) -> RunTokens:
        rows = select(experiences.c.blob).where(*_of_run(tenant, task_id, run_id), experiences.c.correction == 0)
        found = self._read(rows.order_by(*_SAMPLED_ORDER))
        return count_tokens(CallTokens(*from_blob(row.blob)[:2]) for row in found)

    def find_breaks(self, tenant: str, task_id: str, run_id: str) -> list[str]:
        rows = select(experiences.c.blob, exchanges.c.request).join(
            exchanges, exchanges.c.msg_id == experiences.c.msg_id
        )
        rows = rows.where(*_of_run(tenant, task_id, run_id), experiences.c.correction == 0, experiences.c.choice == 0)
        calls = []
        for row in self._read(rows.order_by(*_SAMPLED_ORDER)):
            turns: object = None
            with suppress(ValueError, AttributeError):  # it was redacted, or is no object
                turns = json.loads(unpack_text(row.request)).get("messages")
            calls.append(_Asked(*from_blob(row.blob)[:2], turns if isinstance(turns, list) else ()))
        return list(islice(find_breaks(calls), _MOST_BREAKS))

    def find_breaks_beside(self, msg_id: str) -> list[str]:
        run = select(experiences.c.tenant, experiences.c.task_id, experiences.c.run_id)
        found = self._read(run.where(experiences.c.msg_id == msg_id, experiences.c.run_id.is_not(None)).limit(1))
        return [sentence for row in found if row.task_id is not None for sentence in self.find_breaks(*row)]


def _of_run(tenant: str, task_id: str, run_id: str) -> tuple[ColumnElement[bool], ...]:
    return experiences.c.tenant == tenant, experiences.c.task_id == task_id, experiences.c.run_id == run_id


_COMMITTED = literally(COMMITTED)

_NOT_EDITED: ColumnElement[bool] = text(f"NOT ({EDITED})")  # type: ignore[assignment]

COLUMNS = tuple(
    experiences.c[name]
    for name in (
        *("id", "policy", "tenant", "task_id", "run_id", "msg_id", "choice", "state", "committed_at", "group_id"),
        *("unsampled", "reward", "reward_rule", "sampled_at", "rewarded_at", "correction"),
    )
)
_EARLY = (State.RECORDED, State.REWARDED)

Key = tuple[str | None, ...]


def key_of(row: Any, rules: BatchRules) -> Key:
    """What the rows of a group by run or task agree in; choices of a reply that names no task are a group."""
    if row.task_id is None:
        return row.tenant, row.msg_id
    run = () if rules.group_by == "task" else (row.msg_id if row.run_id is None else row.run_id,)
    return row.tenant, row.task_id, *run


def run_of(row: Any) -> str:
    return f"{row.msg_id}:{row.choice}" if row.run_id is None else str(row.run_id)


def takable(rules: BatchRules) -> ColumnElement[bool]:
    """Whether a batch takes a row, for its policy, how it was sampled, and what was said of it."""
    sampled = true() if rules.any_reply else experiences.c.unsampled.is_(None)
    return and_(of_policy(rules), sampled, true() if rules.edited else _NOT_EDITED)


def of_policy(rules: BatchRules) -> ColumnElement[bool]:
    return experiences.c.policy == rules.policy


def young(rules: BatchRules) -> ColumnElement[bool]:
    """Whether a row may be trained on after the policy's newest version."""
    if rules.max_staleness is None:
        return true()
    line = versions.c.policy == rules.policy
    newest = select(func.max(versions.c.version)).where(line, versions.c.state.in_(SERVABLE)).scalar_subquery()
    older = select(versions.c.version).where(line, versions.c.version <= newest).order_by(versions.c.version.desc())
    oldest = older.offset(max(rules.max_staleness, 0)).limit(1).scalar_subquery()
    return experiences.c.version_min >= func.coalesce(oldest, 0) - min(rules.max_staleness, 0)


def gather(connection: Connection, rules: BatchRules, *, now: float) -> None:
    alone = select(*COLUMNS).where(_COMMITTED, experiences.c.group_id.is_(None), takable(rules))
    rows = without_results(connection, connection.execute(alone.order_by(experiences.c.id)).all())
    if rules.group_by == "preference":
        _gather_the_preferred(connection, rows, rules, now)
    else:
        will_do = and_(takable(rules), young(rules))
        _gather_the_named(connection, rows, rules, will_do, now)


def _set(connection: Connection, rows: Iterable[Any], **values: object) -> None:
    for portion in portions([row.id for row in rows]):
        connection.execute(update(experiences).where(experiences.c.id.in_(portion), _COMMITTED).values(values))


def _since(rows: Iterable[Any], rules: BatchRules) -> float:
    """Since when a group waits for what it lacks."""
    times = (min(row.committed_at, row.rewarded_at) if rules.automatic else row.committed_at for row in rows)
    return float(min(times))


def _join(connection: Connection, groups: Collection[Sequence[Any]]) -> None:
    """Make groups of committed rows. One that new feedback has changed since they were read waits for the next look."""
    there = lock_rows(connection, {row.id for rows in groups for row in rows})
    for rows in groups:
        found = [there[row.id] for row in rows if row.id in there]
        if [(each.state, each.group_id) for each in found] == [(State.COMMITTED, row.group_id) for row in rows]:
            _set(connection, rows, group_id=min(row.id for row in rows))


# By task and run.


def _gather_the_named(
    connection: Connection, alone: Sequence[Any], rules: BatchRules, will_do: ColumnElement[bool], now: float
) -> None:
    """A group has enough runs, and none waits for feedback; by a result, earlier calls that `will_do` come along."""
    found: dict[Key, list[Any]] = defaultdict(list)
    for row in alone:
        found[key_of(row, rules)].append(row)
    tasks, takes = {(key[0], key[1]) for key in found}, takable(rules)
    if rules.by_result:
        early = waiting_runs(connection, tasks, takes)
    else:
        named = tuple_(experiences.c.tenant, experiences.c.task_id)
        query = select(experiences.c.tenant, experiences.c.task_id, experiences.c.run_id).distinct()
        query = query.where(experiences.c.task_id.is_not(None), experiences.c.state.in_(_EARLY), takes)
        early = {tuple(run) for few in portions(tasks, of=2) for run in connection.execute(query.where(named.in_(few)))}
    waiting = {part for run in early for part in (run[:2], run)}
    enough, least = (rules.group_size, rules.least_runs) if rules.group_by == "task" else (1, 1)
    complete: list[list[Any]] = []
    for key, rows in found.items():
        runs = len({run_of(row) for row in rows})
        timed_out = now - _since(rows, rules) >= rules.group_timeout
        if (runs >= enough and key not in waiting) or (timed_out and runs >= least):
            complete.append(rows)
        elif timed_out:
            told = "alone in its group" if least == 2 else f"{runs} of the {least} runs of its group"
            reason = f"{told} {rules.group_timeout:g} s after it was committed"
            _set(connection, rows, state=State.EXPIRED, reason=reason)
    if rules.by_result:
        gather_whole(connection, complete, will_do, now=now)
    else:
        _join(connection, complete)


# By preference.

#: Rows that preferences connect: a group is trained on whole, in one batch. The rows of one preference may be more.
MAX_CONNECTED = 32


def _gather_the_preferred(connection: Connection, alone: Sequence[Any], rules: BatchRules, now: float) -> None:
    """A group is what preferences connect, up to MAX_CONNECTED rows, none of which waits for anything any more."""
    events = standing_preferences(connection, {row.msg_id for row in alone})
    ends = list(ends_of(connection, events))
    ready = {row.id: row for row in chain(alone, *chain.from_iterable(ends)) if _is(row, (State.COMMITTED,), rules)}
    groups: dict[int, list[int]] = defaultdict(list)
    gathered = {row.group_id for row in ready.values()} - {None}
    for row in find(connection.execute, select(*COLUMNS).where(_COMMITTED), experiences.c.group_id, gathered):
        groups[row.group_id].append(row.id)
        ready[row.id] = row
    links = list(groups.values())
    named, waiting = set[int](), set[int]()
    for pair in ends:
        better, worse = ([row.id for row in end if row.id in ready] for end in pair)
        named |= {*better, *worse}
        if any(not end or any(_is(row, _EARLY, rules) for row in end) for end in pair):
            waiting |= {*better, *worse}
        if better and worse:
            links.append([*better, *worse])
    complete: list[list[Any]] = []
    for ids in connected_sets(ready, links):
        rows = [ready[id_] for id_ in ids]
        timed_out = now - _since(rows, rules) >= rules.group_timeout
        if len(rows) > 1 and (timed_out or waiting.isdisjoint(ids)):
            complete.append(rows)
        elif timed_out:
            why = "alone in its preference" if ids & named else "in no preference"
            reason = f"{why} {rules.group_timeout:g} s after it was committed"
            _set(connection, rows, state=State.EXPIRED, reason=reason)
    _join(connection, complete)


def standing_preferences(connection: Connection, msg_ids: Collection[str]) -> list[Any]:
    """The preferences that name any of the replies, but for those that were taken back."""
    by_id: dict[int, Any] = {}
    preferences = select(feedback).where(feedback.c.other_msg_id.is_not(None))
    for name in (feedback.c.msg_id, feedback.c.other_msg_id):
        by_id |= {event.id: event for event in find(connection.execute, preferences, name, msg_ids)}
    found_retractions = retractions(connection, {event.msg_id for event in by_id.values()})
    retracted = set(retracted_preferences(sorted([*by_id.values(), *found_retractions], key=event_order)))
    found = (by_id[id_] for id_ in sorted(by_id))  # the first make the groups, at each look the same ones
    standing = [event for event in found if event.id not in retracted and event.msg_id is not None]
    return without_quarantined(connection, standing)


def _is(row: Any, states: Collection[State], rules: BatchRules) -> bool:
    rated = row.reward is not None or row.state == State.RECORDED
    return (
        row.policy == rules.policy
        and row.state in states
        and (rules.any_reply or row.unsampled is None)
        and (rules.edited or rated)
    )


def ends_of(connection: Connection, events: Sequence[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """For each preference the rows of the better reply and those of the worse one, as far as they are there."""
    names = {name for event in events for name in (event.msg_id, event.other_msg_id)}
    rows: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in find(connection.execute, select(*COLUMNS), experiences.c.msg_id, names):
        rows[row.tenant, row.msg_id].append(row)
    for event in events:
        better, worse = rows[event.tenant, event.msg_id], rows[event.tenant, event.other_msg_id]
        yield _of_choice(better, event.choice), _of_choice(worse, event.other_choice)


def _of_choice(rows: Iterable[Any], choice: int | None) -> list[Any]:
    return [row for row in rows if choice in (None, row.choice)]


def connected_sets(ids: Iterable[int], links: Iterable[Collection[int]]) -> list[set[int]]:
    """What the links connect, each in one set. A link between sets that together are too large connects nothing.

    >>> connected_sets([1, 2, 3, 4, 5], [[1, 4], [2, 3], [3, 1]])
    [{1, 2, 3, 4}, {5}]
    """
    set_of = {id_: {id_} for id_ in ids}
    for link in links:
        parts = sorted({id(set_of[id_]): set_of[id_] for id_ in link}.values(), key=len)
        if sum(map(len, parts)) > max(MAX_CONNECTED, len({*link})):
            continue
        for part in parts[:-1]:  # the smaller into the largest, so that none is moved often
            parts[-1].update(part)
            set_of.update(dict.fromkeys(part, parts[-1]))
    return list({id(each): each for each in set_of.values()}.values())
