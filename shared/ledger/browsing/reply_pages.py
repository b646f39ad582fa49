"""Replies from the newest to the oldest, page by page, by what people look for.

No page costs more because the ledger is larger: each looks at so many replies at most, and says how far back that was.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, LargeBinary, Select, and_, func, select, true, tuple_

from tuneloop.shared.experience import State
from tuneloop.shared.ledger.recording.stored_completions import MAX_PAGE_BYTES, first_of_size
from tuneloop.shared.ledger.storage import codec
from tuneloop.shared.ledger.storage.database import LedgerPart
from tuneloop.shared.ledger.storage.schema import exchanges, experiences

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

#: Characters of a reply that a list shows.
PREVIEW = 300

_EXAMINED = (
    *("id", "sampled_at", "tenant", "correction", "state", "reward", "version_min", "version_max", "task_id", "run_id"),
)


class ReplyCursor(NamedTuple):
    sampled_at: float
    id: int


class ReplyFilter(NamedTuple):
    """What is looked for; None is anything. `text` stands somewhere in the request or the reply, in either case."""

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
    """A reply in the list; `text` is its beginning, `request` the client's JSON."""

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
    """Some replies. `after`: where the next page begins, None at the end of the list.

    `back_to`: the page is not full because so many were looked at, down to this time; None: it is full, or the last.
    """

    rows: list[ReplyRow]
    after: ReplyCursor | None
    back_to: float | None


class ReplyPages(ReplyTexts):
    def page(self, tenant: str, wanted: ReplyFilter, *, after: ReplyCursor | None, limit: int) -> ReplyPage:
        """The next replies that are `wanted`, the newest first. A reply counts once, as it was sampled.

        A page may have fewer than `limit` although there are more: its requests have about MAX_PAGE_BYTES at most.
        """
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
        """The replies that are looked at, and how many those are at most; None: all that could be wanted."""
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
        """Where to look on, and from which time, if not all was looked at."""
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
    """Go through the replies by the index of the one condition that has one.

    Stretches of it say what an equation would: of an equation PostgreSQL knows that its order is the one by time alone,
    and goes by time through all that is newer, where it takes the replies that are wanted to be spread evenly.
    """
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
