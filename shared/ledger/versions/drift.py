"""The ledger's verbs for the monitors: the newest replies, and who gave the newest feedback.

All read backwards from the newest row, or that of each key, so that they cost the same however much the ledger holds.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, exists, func, select, true
from zstandard import ZstdError

from tuneloop.shared.experience import MAX_REWARD, Kind
from tuneloop.shared.ledger.raters.newest_feedback import KeyWithFeedback, keys_with_feedback, newest_of_key
from tuneloop.shared.ledger.raters.rater_tables import RaterState, raters
from tuneloop.shared.ledger.raters.standing import rater_of
from tuneloop.shared.ledger.raters.voice_shares import SILENT_S, SuspectEvent, share_amiss
from tuneloop.shared.ledger.storage.codec import unpack_text
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback
from tuneloop.shared.ledger.storage.transactions import LedgerPart, portions
from tuneloop.shared.settings.feedback import RewardRule

#: Characters of a reply that are looked at.
LONGEST = 2000

# Where few events name a source, no more than so many times the events asked for are read.
_STRETCH = 10

# So many keys are looked at, of each tenant in turn that which spoke last.
_MOST_KEYS = 100


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
        """The part of the newest numbers under metrics that count that is beyond the clip, as voices share in it.

        Those of raters in quarantine are left out. None if there are not `count`.
        """
        weights = {metric: weight for metric, weight in rule.weights.items() if weight}
        low, high = rule.clip or (-MAX_REWARD, MAX_REWARD)
        numbers = and_(feedback.c.kind == Kind.NUMBER, feedback.c.metric.in_(weights), ~_IS_QUARANTINED)
        rows = self._newest_of_voices(count, numbers)
        return share_amiss((_suspect(row, not low <= weights[row.metric] * row.value <= high) for row in rows), count)

    def quarantined_share(self, count: int) -> float | None:
        """The part of the newest feedback that raters in quarantine gave, as voices share in it. None as above."""
        query = select(raters.c.tenant, raters.c.name).where(raters.c.state == RaterState.QUARANTINED)
        quarantined, rows = {(row.tenant, row.name) for row in self._read(query)}, self._newest_of_voices(count, true())
        return share_amiss((_suspect(row, rater_of(row) in quarantined) for row in rows), count)

    def _newest_of_voices(self, count: int, wanted: ColumnElement[bool]) -> Iterator[Any]:
        """The newest events of each key, `count` at least where it has them: whoever floods hides nobody."""
        turns: Counter[str] = Counter()
        of_tenant: list[tuple[int, int, KeyWithFeedback]] = []
        for key in sorted(keys_with_feedback(self._read), key=lambda each: each.newest, reverse=True):
            turns[key.tenant] += 1
            of_tenant.append((turns[key.tenant], -key.newest, key))
        keys = [key for *_, key in sorted(of_tenant, key=lambda each: each[:2])[:_MOST_KEYS]]
        newest = select(feedback.c.id, feedback.c.received_at).where(feedback.c.id.in_([key.newest for key in keys]))
        spoke = {row.id: row.received_at for row in self._read(newest)}
        since = max(spoke.values(), default=0.0) - SILENT_S
        speaking = [key for key in keys if spoke.get(key.newest, 0.0) >= since]
        for key in speaking:
            # Of each as many as of all: where only one of many says what is wanted, that must be enough to go by.
            yield from self._read(newest_of_key(key, wanted, max(count, _STRETCH * count // len(speaking))))


_IS_QUARANTINED = exists().where(
    and_(raters.c.tenant == feedback.c.tenant, raters.c.name == func.coalesce(feedback.c.source, "")),
    raters.c.state == RaterState.QUARANTINED,
)


def _suspect(row: Any, amiss: bool) -> SuspectEvent:
    return SuspectEvent(row.id, row.received_at, rater_of(row), amiss)


def _readable(stored: bytes) -> bytes | None:
    """The request; None if its bytes are damaged, which must not stop a trainer."""
    try:
        return unpack_text(stored)
    except ZstdError:
        return None
