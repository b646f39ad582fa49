"""Replies from the newest to the oldest, page by page, by what people look for."""

import hashlib
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, LargeBinary, Select, and_, func, or_, select, true, tuple_

from tuneloop.shared.experience import Kind, State
from tuneloop.shared.ledger.recording.stored_completions import MAX_PAGE_BYTES, first_of_size
from tuneloop.shared.ledger.storage import codec
from tuneloop.shared.ledger.storage.database import LedgerPart
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback

#: Bytes of requests and replies that are read for one page, those included of which it shows nothing.
MAX_READ_BYTES = 256 << 20

_PORTION = 250


class ReplyTexts(LedgerPart):
    def _split(self, keys: Sequence[Any]) -> Iterator[list[Any]]:
        """The keys of replies, which have ids, in portions that may be read at once."""
        total = 0
        for begin in range(0, len(keys), _PORTION):
            rest = list(keys[begin : begin + _PORTION])
            head = func.substr(exchanges.c.request, 1, codec.TEXT_HEAD, type_=LargeBinary).label("head")
            reply = func.length(experiences.c.text) + func.coalesce(func.length(experiences.c.tool_calls), 0)
            columns = experiences.c.id, head, func.length(exchanges.c.request).label("stored"), reply.label("reply")
            query = select(*columns).join_from(experiences, exchanges, exchanges.c.msg_id == experiences.c.msg_id)
            sizes = {
                row.id: codec.text_size(row.head or b"", row.stored) + int(row.reply)
                for row in self._read(query.where(experiences.c.id.in_([key.id for key in rest])))
            }
            while rest and total < MAX_READ_BYTES:
                some = first_of_size(rest, [sizes.get(key.id, 0) for key in rest])
                total += sum(sizes.get(key.id, 0) for key in some)
                yield some
                rest = rest[len(some) :]
            if rest:
                return


#: Replies that are looked at for one page by their columns; those whose words are read, which costs more.
MAX_EXAMINED, MAX_READ = 20_000, 2_000

#: A person or a task with no more replies than this is found by an index of its own.
_RARE = 2_000

PREVIEW = 300

_EXAMINED = (
    *("id", "sampled_at", "tenant", "correction", "state", "reward", "version_min", "version_max", "task_id", "run_id"),
)


class ReplyCursor(NamedTuple):
    sampled_at: float
    id: int


class ReplyFilter(NamedTuple):
    """Filters of the search; None matches all. `text` matches in request or reply, ignoring case."""

    text: str | None = None
    state: State | None = None
    version: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    task_id: str | None = None
    run_id: str | None = None
    user: str | None = None
    since: float | None = None
    until: float | None = None


class ReplyRow(NamedTuple):
    id: int
    msg_id: str
    choice: int
    sampled_at: float
    state: State
    reason: str | None
    reward: float | None
    version_min: int
    version_max: int
    task_id: str | None
    run_id: str | None
    completion_tokens: int
    user: str | None
    text: str
    request: bytes


class ReplyPage(NamedTuple):
    """Some replies; `after`: where the next page begins; `back_to`: so far was looked, where the page is not full."""

    rows: list[ReplyRow]
    after: ReplyCursor | None
    back_to: float | None


class ReplyPages(ReplyTexts):
    def page(self, tenant: str, wanted: ReplyFilter, *, after: ReplyCursor | None, limit: int) -> ReplyPage:
        examined, bound = self._select_examined(tenant, wanted, after)
        most = MAX_READ if wanted.text else limit + 1
        keys = [ReplyCursor(*row) for row in self._read(_matching(examined, tenant, wanted).limit(most))]
        if wanted.text:
            return self._containing(wanted.text, keys, examined, bound, limit)
        shown = next(self._split(keys[:limit]), [])
        rows = self._rows(shown)
        if len(keys) > len(shown):
            return ReplyPage(rows, shown[-1], None)
        return ReplyPage(rows, *self._end_of(examined, bound))

    def _select_examined(self, tenant: str, wanted: ReplyFilter, after: ReplyCursor | None) -> tuple[Any, int | None]:
        """The replies to examine, and their largest number; None: no limit."""
        names = [experiences.c[name] for name in _EXAMINED]
        # The stretch of time, and what is not on an earlier page.
        conditions: list[ColumnElement[bool]] = [true()]
        if wanted.since is not None:
            conditions.append(experiences.c.sampled_at >= wanted.since)
        if wanted.until is not None:
            conditions.append(experiences.c.sampled_at <= wanted.until)
        if after is not None:
            conditions.append(experiences.c.sampled_at <= after.sampled_at)  # which an index understands
            conditions.append(tuple_(experiences.c.sampled_at, experiences.c.id) < after)
        within = and_(*conditions)
        if wanted.user is not None:
            joined = experiences.c.msg_id == exchanges.c.msg_id
            query = select(*names, exchanges.c.user_id).join_from(exchanges, experiences, joined).where(within)
            theirs = and_(exchanges.c.tenant == tenant, exchanges.c.user_id == wanted.user)
            if self._is_rare(select(exchanges.c.msg_id).where(theirs)):
                return query.where(theirs).subquery(), None
        else:
            query = select(*names).where(within)
        if wanted.task_id is not None:
            of_task = and_(experiences.c.tenant == tenant, experiences.c.task_id == wanted.task_id)
            if self._is_rare(select(experiences.c.id).where(of_task)):
                return query.where(of_task).subquery(), None
        driven = _drive(query, wanted, after).order_by(experiences.c.sampled_at.desc(), experiences.c.id.desc())
        return driven.limit(MAX_EXAMINED).subquery(), MAX_EXAMINED

    def _is_rare(self, query: Select[Any]) -> bool:
        some = query.limit(_RARE + 1).subquery()
        return int(self._read(select(func.count()).select_from(some))[0][0]) <= _RARE

    def _end_of(self, examined: Any, bound: int | None) -> tuple[ReplyCursor | None, float | None]:
        """The position and time to continue the search from, if it is incomplete."""
        if bound is None:
            return None, None
        [(count,)] = self._read(select(func.count()).select_from(examined))
        if count < bound:
            return None, None
        [last] = self._read(
            select(examined.c.sampled_at, examined.c.id)
            .order_by((examined.c.sampled_at + 0).asc(), examined.c.id.asc())
            .limit(1)
        )
        return ReplyCursor(*last), last.sampled_at

    def _containing(
        self, text: str, keys: list[ReplyCursor], examined: Any, bound: int | None, limit: int
    ) -> ReplyPage:
        """Those of the replies that have the text, as far as there is room on the page."""
        found: list[ReplyRow] = []
        sought, held, last = text.casefold(), 0, None
        for portion in self._split(keys):
            for row in self._rows(portion, whole=True):
                if sought in row.text.casefold() or sought in row.request.decode(errors="replace").casefold():
                    found.append(row._replace(text=row.text[:PREVIEW]))
                    held += len(row.request)
                if len(found) == limit or held > MAX_PAGE_BYTES:
                    return ReplyPage(found, ReplyCursor(row.sampled_at, row.id), None)
            last = portion[-1]
        if last is not None and (last != keys[-1] or len(keys) == MAX_READ):
            return ReplyPage(found, last, last.sampled_at)
        return ReplyPage(found, *self._end_of(examined, bound))

    def _rows(self, keys: list[ReplyCursor], *, whole: bool = False) -> list[ReplyRow]:
        text = experiences.c.text if whole else func.substr(experiences.c.text, 1, PREVIEW).label("text")
        names = ReplyRow._fields[:-3]
        columns = (*(experiences.c[name] for name in names), exchanges.c.user_id, text, exchanges.c.request)
        joined = exchanges.c.msg_id == experiences.c.msg_id
        query = select(*columns).join_from(experiences, exchanges, joined)
        rows = self._read(query.where(experiences.c.id.in_([key.id for key in keys])))
        found = {
            row.id: ReplyRow(*row)._replace(state=State(row.state), request=codec.unpack_text(row.request))
            for row in rows
        }
        return [found[key.id] for key in keys if key.id in found]


def _drive(query: Select[Any], wanted: ReplyFilter, after: ReplyCursor | None) -> Select[Any]:
    """Go through replies by the index of the one condition that has one, by stretches: PostgreSQL would go by time."""
    by_version = wanted.version is not None
    column, value = (experiences.c.version_min, wanted.version) if by_version else (experiences.c.state, wanted.state)
    if value is None:
        return query
    newest = inf if after is None else after.sampled_at
    stretch = and_(column >= value, tuple_(column, experiences.c.sampled_at) <= (value, newest))
    return query.where(stretch).order_by(column.desc())


def _matching(examined: Any, tenant: str, wanted: ReplyFilter) -> Select[Any]:
    columns = examined.c
    conditions = [columns.tenant == tenant, columns.correction == 0]
    same = {"state": wanted.state, "task_id": wanted.task_id, "run_id": wanted.run_id, "user_id": wanted.user}
    conditions += [columns[name] == value for name, value in same.items() if value is not None]
    if wanted.version is not None:
        conditions.append(columns.version_min == wanted.version)
    if wanted.reward_from is not None:
        conditions.append(columns.reward >= wanted.reward_from)
    if wanted.reward_to is not None:
        conditions.append(columns.reward <= wanted.reward_to)
    # The sum: no index is gone through for the sake of the order.
    order = (columns.sampled_at + 0).desc(), columns.id.desc()
    return select(columns.sampled_at, columns.id).where(*conditions).order_by(*order)


#: Replies of each version, and in all, among which the same prompts are looked for.
AMONG_OF_VERSION, AMONG_ALL = 1_000, 2_000


class PromptAnswer(NamedTuple):
    id: int
    msg_id: str
    choice: int
    sampled_at: float
    version: int
    reward: float | None
    text: str
    tool_calls: bytes | None

    @property
    def name(self) -> str:
        return f"{self.msg_id}:{self.choice}"


class AnswerPair(NamedTuple):
    request: bytes
    one: PromptAnswer
    other: PromptAnswer


class SamePrompts(ReplyTexts):
    def side_by_side(self, tenant: str, a: int, b: int, *, limit: int) -> list[AnswerPair]:
        """Answers of version a and of version b to the same prompts, the newest of each; fewer if those are long."""
        ours: dict[bytes, int] = {}
        for answer in self._newest(_of_version(tenant, a), None, AMONG_OF_VERSION):
            ours.setdefault(answer.prompt, answer.id)
        found: dict[bytes, tuple[int, int]] = {}
        for answer in self._newest(_of_version(tenant, b), None, AMONG_OF_VERSION):
            if answer.prompt in ours and answer.prompt not in found:
                found[answer.prompt] = ours[answer.prompt], answer.id
                if len(found) == limit:
                    break
        return self._pairs(list(found.values()))

    def next_pair(self, tenant: str, after: ReplyCursor | None) -> AnswerPair | None:
        """Two different answers to one prompt that have not been compared; the second is the newest behind `after`."""
        seen: dict[bytes, _Digests] = {}
        for answer in self._newest(experiences.c.tenant == tenant, after, AMONG_ALL):
            other = seen.setdefault(answer.prompt, answer)
            compared = or_(
                and_(feedback.c.msg_id == answer.msg_id, feedback.c.other_msg_id == other.msg_id),
                and_(feedback.c.msg_id == other.msg_id, feedback.c.other_msg_id == answer.msg_id),
            )
            preferences = and_(feedback.c.tenant == tenant, feedback.c.kind == Kind.PREFERENCE, compared)
            if other.reply == answer.reply or self._read(select(feedback.c.id).where(preferences).limit(1)):
                continue
            if pairs := self._pairs([(other.id, answer.id)]):
                return pairs[0]
        return None

    def _newest(self, which: ColumnElement[bool], after: ReplyCursor | None, among: int) -> Iterator["_Digests"]:
        behind: ColumnElement[bool] = true()
        if after is not None:
            key = tuple_(experiences.c.sampled_at, experiences.c.id)
            behind = and_(experiences.c.sampled_at <= after.sampled_at, key < after)
        newest = select(experiences.c.id, experiences.c.correction).where(which, behind)
        newest = newest.order_by(experiences.c.sampled_at.desc(), experiences.c.id.desc()).limit(among)
        keys = [row for row in self._read(newest) if row.correction == 0]
        for portion in self._split(keys):
            rows = {row.id: row for row in self._read(_select_texts([key.id for key in portion]))}
            for key in portion:
                if (row := rows.pop(key.id, None)) is not None:
                    prompt = digest_of_prompt(codec.unpack_text(row.request))
                    yield _Digests(
                        row.id,
                        row.msg_id,
                        prompt,
                        _digest(row.text.encode(errors="surrogatepass"))
                        + (b"" if row.tool_calls is None else _digest(row.tool_calls)),
                    )

    def _pairs(self, ids: Sequence[tuple[int, int]]) -> list[AnswerPair]:
        """The answers of these ids, as far as they are still there, and their requests may be in memory at once."""
        of_both = experiences.c.id.in_([each for pair in ids for each in pair])
        answers = {row.id: PromptAnswer(*row) for row in self._read(select(*_ANSWER).where(of_both))}
        there = [pair for pair in ids if answers.keys() >= set(pair)]
        shown = next(self._split([answers[one] for one, _ in there]), [])
        requests = {row.id: row.request for row in self._read(_select_texts([one.id for one in shown]))}
        return [
            AnswerPair(codec.unpack_text(requests[one]), answers[one], answers[other])
            for one, other in there[: len(shown)]
            if one in requests
        ]


class _Digests(NamedTuple):
    id: int
    msg_id: str
    prompt: bytes
    reply: bytes


class _Prompt(msgspec.Struct):
    messages: Any = msgspec.UNSET
    prompt: Any = msgspec.UNSET
    input: Any = msgspec.UNSET
    system: Any = msgspec.UNSET
    instructions: Any = msgspec.UNSET
    tools: Any = msgspec.UNSET


def digest_of_prompt(request: bytes) -> bytes:
    try:
        prompt = msgspec.json.encode(msgspec.json.decode(request, type=_Prompt), order="deterministic")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # an imported row may hold anything
        prompt = request
    return _digest(prompt)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _of_version(tenant: str, version: int) -> ColumnElement[bool]:
    alone = and_(experiences.c.version_min == version, experiences.c.version_max == version)
    return and_(alone, experiences.c.tenant == tenant)


_ANSWER = (
    *(experiences.c[name] for name in ("id", "msg_id", "choice", "sampled_at")),
    *(experiences.c[name] for name in ("version_min", "reward", "text", "tool_calls")),
)


def _select_texts(ids: Sequence[int]) -> Select[Any]:
    names = ("id", "msg_id", "text", "tool_calls")
    joined = exchanges.c.msg_id == experiences.c.msg_id
    query = select(*(experiences.c[name] for name in names), exchanges.c.request)
    return query.join_from(experiences, exchanges, joined).where(experiences.c.id.in_(ids))
