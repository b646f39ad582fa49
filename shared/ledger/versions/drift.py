"""The ledger's verbs for the monitors: the newest replies, and who gave the newest feedback.

Both read backwards from the newest row, so that they cost the same however much the ledger holds.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import and_, exists, func, select
from zstandard import ZstdError

from tuneloop.shared.experience import MAX_REWARD, Kind
from tuneloop.shared.ledger.raters.rater_tables import RaterState, raters
from tuneloop.shared.ledger.storage.codec import unpack_text
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback
from tuneloop.shared.ledger.storage.transactions import LedgerPart, portions
from tuneloop.shared.settings.feedback import RewardRule

#: Characters of a reply that are looked at.
LONGEST = 2000

# Where few events name a source, no more than so many times the events asked for are read.
_STRETCH = 10


class ReplyExcerpt(NamedTuple):
    """One reply: the first LONGEST characters of its text, its tool calls and the request, both the client's JSON.

    The request is read only for a reply that calls tools, or holds one of the marks asked for; None if it is damaged.
    """

    text: str
    tool_calls: bytes | None
    request: bytes | None


class Drift(LedgerPart):
    """Queries that change nothing."""

    def newest_replies(self, count: int, *, marks: Sequence[str] = ()) -> list[ReplyExcerpt]:
        """The newest `count` replies, the newest first; `marks` are texts that call for the request, too."""
        columns = (experiences.c.msg_id, func.substr(experiences.c.text, 1, LONGEST), experiences.c.tool_calls)
        query = select(*columns).where(experiences.c.correction == 0).order_by(experiences.c.id.desc()).limit(count)
        rows = self._read(query)
        wanted = {msg_id for msg_id, text, calls in rows if calls or any(mark in text for mark in marks)}
        requests: dict[str, bytes | None] = {}
        for portion in portions(wanted):
            query_of_requests = select(exchanges.c.msg_id, exchanges.c.request).where(exchanges.c.msg_id.in_(portion))
            requests |= {msg_id: _readable(request) for msg_id, request in self._read(query_of_requests)}
        return [ReplyExcerpt(text, calls, requests.get(msg_id)) for msg_id, text, calls in rows]

    def largest_rater(self, count: int) -> float | None:
        """The share of the most frequent source among the newest `count` feedback events that name one.

        Sources of two tenants are two. None if there are not so many among the newest 10 * `count` events, or if these
        all name the same one: a single judge who does all the rating is no drift.
        """
        newest = select(feedback.c.id, feedback.c.tenant, feedback.c.source).order_by(feedback.c.id.desc())
        part = newest.limit(count * _STRETCH).subquery()
        rows = self._read(
            select(part.c.tenant, part.c.source).where(part.c.source.is_not(None)).order_by(part.c.id.desc())
        )
        sources = [(row.tenant, row.source) for row in rows]
        if len(sources) < count or len(set(sources)) < 2:
            return None
        latest = sources[:count]
        return max(latest.count(source) for source in set(latest)) / count

    def extreme_share(self, count: int, rule: RewardRule) -> float | None:
        """The part of the newest `count` numbers under metrics that count that is beyond the clip.

        Those of raters in quarantine are left out. None if there are not so many.
        """
        weights = {metric: weight for metric, weight in rule.weights.items() if weight}
        numbers = and_(feedback.c.kind == Kind.NUMBER, feedback.c.metric.in_(weights), ~_is_quarantined())
        newest = select(feedback.c.metric, feedback.c.value).where(numbers).order_by(feedback.c.id.desc())
        rows = self._read(newest.limit(count))
        low, high = rule.clip or (-MAX_REWARD, MAX_REWARD)
        beyond = sum(not low <= weights[row.metric] * row.value <= high for row in rows)
        return beyond / count if len(rows) == count else None

    def quarantined_share(self, count: int) -> float | None:
        """The part of the newest `count` feedback events that raters in quarantine gave; None if there are fewer."""
        newest = select(_is_quarantined().label("theirs")).select_from(feedback)
        rows = self._read(newest.order_by(feedback.c.id.desc()).limit(count))
        return sum(bool(row.theirs) for row in rows) / count if len(rows) == count else None


def _is_quarantined() -> Any:
    same = and_(raters.c.tenant == feedback.c.tenant, raters.c.name == func.coalesce(feedback.c.source, ""))
    return exists().where(same, raters.c.state == RaterState.QUARANTINED)


def _readable(stored: bytes) -> bytes | None:
    """The request; None if its bytes are damaged, which must not stop a trainer."""
    try:
        return unpack_text(stored)
    except ZstdError:
        return None
