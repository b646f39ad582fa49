"""The ledger's verbs for a judge: the replies that wait for a verdict, and which verdicts are there."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import and_, func, select

from tuneloop.shared.experience import State
from tuneloop.shared.ledger.storage import codec
from tuneloop.shared.ledger.storage.database import LedgerPart, find
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback

#: Of which a verdict can still be of use.
JUDGEABLE = (State.RECORDED, State.REWARDED, State.COMMITTED)


class ReplyState(NamedTuple):
    id: int
    tenant: str
    msg_id: str
    choice: int
    correction: int
    state: str
    sampled_at: float


class JudgedExchange(NamedTuple):
    """A reply with its request; `request` is the client's JSON body."""

    endpoint: str
    request: bytes
    choice: int
    text: str
    tool_calls: bytes | None


class Judging(LedgerPart):
    def first_sampled_since(self, since: float) -> int:
        waiting = and_(experiences.c.state.in_(JUDGEABLE), experiences.c.sampled_at >= since)
        # Of id alone a database would take the least by reading all rows from the first one on.
        [(first,)] = self._read(select(func.min(experiences.c.id + 0)).where(waiting))
        if first is None:
            [(last,)] = self._read(select(func.max(experiences.c.id)))
            return 1 + (last or 0)
        return int(first)

    def replies_after(self, last: int, *, limit: int) -> list[ReplyState]:
        columns = [experiences.c[name] for name in ReplyState._fields]
        query = select(*columns).where(experiences.c.id > last).order_by(experiences.c.id).limit(limit)
        return [ReplyState(*row) for row in self._read(query)]

    def existing_events(self, event_ids: Collection[str]) -> set[str]:
        found = find(self._read, select(feedback.c.event_id), feedback.c.event_id, event_ids)
        return {row.event_id for row in found}

    def exchanges_of(self, ids: Sequence[int]) -> dict[int, JudgedExchange]:
        names = (experiences.c.id, exchanges.c.endpoint, exchanges.c.request)
        words = (experiences.c.choice, experiences.c.text, experiences.c.tool_calls)
        both = experiences.join(exchanges, exchanges.c.msg_id == experiences.c.msg_id)
        query = select(*names, *words).select_from(both).where(experiences.c.id.in_(ids))
        return {
            row.id: JudgedExchange(row.endpoint, codec.unpack_text(row.request), row.choice, row.text, row.tool_calls)
            for row in self._read(query)
        }
