"""The ledger's verbs for exports, a page at a time, and for imports."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import ColumnElement, Select, and_, case, delete, exists, func, insert, or_, select, true, tuple_

from tuneloop.shared.experience import Float32s, Int32s, State
from tuneloop.shared.ledger.recording.reward_rule import without_quarantined
from tuneloop.shared.ledger.recording.rewards import bears_on, event_order
from tuneloop.shared.ledger.storage import codec
from tuneloop.shared.ledger.storage.database import LedgerPart, alone, find, portions
from tuneloop.shared.ledger.storage.schema import erasures, exchanges, experiences, exports, feedback, reward_rules

PAGE = 500

#: The reasons of replies that are no answer to learn from, whatever their reward. `opt_out`: the client forbade it.
NO_ANSWER = ("cut_off", "empty", "opt_out", "side_request")


class Selection(NamedTuple):
    """Which replies to export: of one tenant, and, where given, in these states, of this task, sampled in this time."""

    tenant: str
    states: tuple[State, ...] = ()
    task_id: str | None = None
    since: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExportedReply:
    """A row of `experiences` with its exchange; `events`: the rows of `feedback` that bear on it, in their order."""

    id: int
    msg_id: str
    choice: int
    correction: int
    tenant: str
    user: str | None
    task_id: str | None
    run_id: str | None
    endpoint: str
    request: bytes
    text: str
    tool_calls: bytes | None
    blob: bytes
    temperature: float
    finish_reason: str | None
    reward: float | None
    reward_rule: str | None
    state: str
    reason: str | None
    unsampled: str | None
    version_min: int
    version_max: int
    trained_version: int | None
    sampled_at: float
    rewarded_at: float | None
    committed_at: float | None
    latency_s: float
    priority: float
    events: Sequence[Any]

    @property
    def numbers(self) -> tuple[Int32s, Int32s, Float32s]:
        return codec.from_blob(self.blob)

    def is_subject_of(self, event: Any) -> bool:
        """Whether a row of `feedback` that bears on it is about it, and not about one that was preferred to it."""
        if event.msg_id is None:
            return True
        return event.msg_id == self.msg_id and event.choice in (None, self.choice)


class Ranked(NamedTuple):
    ids: "np.ndarray[Any, np.dtype[np.int64]]"
    rewards: "np.ndarray[Any, np.dtype[np.float64]]"
    prompts: "np.ndarray[Any, np.dtype[np.uint64]]"


class Exports(LedgerPart):
    def replies(self, selection: Selection, *, everything: bool = False) -> Iterator[list[ExportedReply]]:
        """The replies in pages by id, each's last correction; `everything`: all, with what quarantined raters said."""
        wanted = and_(_where(selection), true() if everything else _newest())
        last = 0
        while page := self._replies(and_(wanted, experiences.c.id > last), everything=everything):
            yield page
            last = page[-1].id

    def replies_by_id(self, ids: Collection[int]) -> dict[int, ExportedReply]:
        return {
            each.id: each
            for portion in portions(ids, of=_PARAMETERS_PER_REPLY)
            for each in self._replies(experiences.c.id.in_(portion), limit=None)
        }

    def replies_named(self, tenant: str, msg_ids: Collection[str]) -> Iterator[ExportedReply]:
        """The tenant's replies of these names, every choice of them, each in its last correction."""
        for portion in portions(msg_ids, of=_PARAMETERS_PER_REPLY):
            wanted = and_(experiences.c.msg_id.in_(portion), experiences.c.tenant == tenant, _newest())
            yield from self._replies(wanted, limit=None)

    def ranked_replies(self, selection: Selection, digest: Callable[[bytes], int | None]) -> Iterator[Ranked]:
        """The rewarded replies in pages; `digest` makes a number of a prompt's ids, or None to leave the reply out."""
        columns = experiences.c.id, experiences.c.reward, experiences.c.blob
        answers = or_(experiences.c.reason.is_(None), experiences.c.reason.not_in(NO_ANSWER))
        wanted = and_(_where(selection), _newest(), experiences.c.reward.is_not(None), answers)
        last = 0
        while rows := self._read(_page(select(*columns), and_(wanted, experiences.c.id > last))):
            digests = [(row, digest(codec.from_blob(row.blob)[0].tobytes())) for row in rows]
            found = [(row.id, row.reward, prompt) for row, prompt in digests if prompt is not None]
            ids, rewards, prompts = zip(*found, strict=True) if found else ((), (), ())
            yield Ranked(np.array(ids, np.int64), np.array(rewards, np.float64), np.array(prompts, np.uint64))
            last = rows[-1].id

    def rewards_of(self, msg_ids: Collection[str]) -> dict[tuple[str, int], float | None]:
        query = select(experiences.c.msg_id, experiences.c.choice, experiences.c.reward)
        rows = find(self._read, query.order_by(experiences.c.correction), experiences.c.msg_id, msg_ids)
        return {(row.msg_id, row.choice): row.reward for row in rows}

    def erasures_so_far(self, tenant: str) -> tuple[int, float | None]:
        """A value that changes when a person of the tenant is erased."""
        [row] = self._read(_erasures(tenant))
        return tuple(row)

    def record_file(self, path: str, format_: str, rows: int, *, of: Selection, unless: object, publish: Any) -> bool:
        """Record a file, which `publish` puts in its place; False if a person was erased since `unless` was read."""
        with self._write() as connection:
            alone(connection, "exports")
            if tuple(connection.execute(_erasures(of.tenant)).one()) != unless:
                return False
            connection.execute(delete(exports).where(exports.c.path == path))
            row = {"path": path, "format": format_, "rows": rows, "created_at": self._clock()}
            connection.execute(insert(exports), row)
            publish()
        return True

    def _replies(
        self, wanted: ColumnElement[bool], limit: int | None = PAGE, *, everything: bool = False
    ) -> list[ExportedReply]:
        rows = self._read(_page(_WITH_EXCHANGE, wanted, limit))
        found: dict[int, Any] = {}
        names = {row.msg_id for row in rows}
        for column in (feedback.c.msg_id, feedback.c.other_msg_id):
            found |= {event.id: event for event in find(self._read, select(feedback), column, names)}
        named = tuple_(feedback.c.tenant, feedback.c.task_id, feedback.c.run_id)
        runs = {_trajectory(row) for row in rows if None not in _trajectory(row)}
        of_runs = select(feedback).where(feedback.c.msg_id.is_(None))
        found |= {event.id: event for event in find(self._read, of_runs, named, runs, of=3)}
        events: Collection[Any] = found.values()
        if not everything:
            with self._snapshot() as connection:
                events = without_quarantined(connection, events)
        by_target: dict[object, list[Any]] = defaultdict(list)
        for event in sorted(events, key=event_order):
            for target in {event.msg_id, event.other_msg_id} - {None} if event.msg_id else {_trajectory(event)}:
                by_target[target].append(event)
        replies = []
        for row in rows:
            of_row = [*by_target.get(row.msg_id, ()), *by_target.get(_trajectory(row), ())]
            heard = [event for event in of_row if bears_on(event, row)]
            fields = {"request": codec.unpack_text(row.request), "events": sorted(heard, key=event_order)}
            replies.append(ExportedReply(**{**row._mapping, **fields}))
        return replies


_PARAMETERS_PER_REPLY = 4

#: A file has no grammars: without its own, a reply is no sample of the policy.
_UNSAMPLED = func.coalesce(experiences.c.unsampled, case((experiences.c.grammar.is_not(None), "sampling:grammar")))

_WITH_EXCHANGE = (
    select(
        *(each for each in experiences.c if each.name in {*ExportedReply.__slots__} - {"reward_rule", "unsampled"}),
        _UNSAMPLED.label("unsampled"),
        reward_rules.c.definition.label("reward_rule"),
        exchanges.c.endpoint,
        exchanges.c.request,
        exchanges.c.latency_s,
        exchanges.c.user_id.label("user"),
    )
    .join_from(experiences, exchanges, exchanges.c.msg_id == experiences.c.msg_id)
    .outerjoin(reward_rules, reward_rules.c.id == experiences.c.reward_rule)
)


def _page(query: Select[Any], wanted: ColumnElement[bool], limit: int | None = PAGE) -> Select[Any]:
    return query.where(wanted).order_by(experiences.c.id).limit(limit)


def _where(selection: Selection) -> ColumnElement[bool]:
    wanted: list[ColumnElement[bool]] = [experiences.c.tenant == selection.tenant]
    if selection.states:
        wanted.append(experiences.c.state.in_(selection.states))
    if selection.task_id is not None:
        wanted.append(experiences.c.task_id == selection.task_id)
    if selection.since is not None:
        wanted.append(experiences.c.sampled_at >= selection.since)
    if selection.until is not None:
        wanted.append(experiences.c.sampled_at <= selection.until)
    return and_(*wanted)


def _newest() -> ColumnElement[bool]:
    later = experiences.alias()
    same = and_(later.c.msg_id == experiences.c.msg_id, later.c.choice == experiences.c.choice)
    return ~exists().where(same, later.c.correction > experiences.c.correction)


def _erasures(tenant: str) -> Any:
    return select(func.count(), func.max(erasures.c.erased_at)).where(erasures.c.tenant == tenant)


def _trajectory(row: Any) -> tuple[str, str | None, str | None]:
    return row.tenant, row.task_id, row.run_id
