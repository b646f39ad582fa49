"""The ledger's verbs for the monitors: the newest replies, and who gave the newest feedback."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, and_, case, exists, func, select
from zstandard import ZstdError

from tuneloop.shared.experience import MAX_REWARD, Kind, Rater, RaterState, rater_of, voice_of
from tuneloop.shared.ledger.storage.codec import unpack_text
from tuneloop.shared.ledger.storage.database import LedgerPart, find
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback, raters
from tuneloop.shared.settings.feedback import RewardRule

#: From so many voters, or tenants, on, one alone raises nothing.
MANY = 3

#: The part of the examined events that one voter may always have.
LEAST_PART = 1 / 20

#: A voter without an event for so many seconds, a week, is not counted.
SILENT_S = 7 * 86400.0


class SuspectEvent(NamedTuple):
    """An event: its place in the ledger, when it came, its source, and whether it is `amiss`."""

    id: int
    received_at: float
    rater: Rater
    amiss: bool


def most_of_one(count: int, voices: int) -> int:
    """How many events of one voter count, where `count` of all voters are examined."""
    return max(1, int(count * LEAST_PART), count // voices)


def share_amiss(events: Iterable[SuspectEvent], count: int) -> float | None:
    """The share amiss of `count` events, evenly of voters, without the voter and tenant with most; None if fewer."""
    newest_first = sorted(events, key=lambda each: each.id, reverse=True)
    if len(newest_first) < count:
        return None
    by_voice: dict[Rater, list[SuspectEvent]] = defaultdict(list)
    for each in newest_first:
        tenant, source = each.rater
        by_voice[tenant, voice_of(source)].append(each)
    since = max(each.received_at for each in newest_first) - SILENT_S
    speaking = {voice: said for voice, said in by_voice.items() if said[0].received_at >= since}
    if len(speaking) < MANY:
        return sum(each.amiss for each in newest_first[:count]) / count
    most = most_of_one(count, len(speaking))
    recent = {voice: said[:most] for voice, said in speaking.items()}
    by_tenant: dict[str, list[SuspectEvent]] = defaultdict(list)
    for (tenant, _), said in recent.items():
        by_tenant[tenant] += said
    shares = [_without_one(recent.values())]
    return min([*shares, _without_one(by_tenant.values())] if len(by_tenant) >= MANY else shares)


def _without_one(parts: Collection[Sequence[SuspectEvent]]) -> float:
    """The least share that is left without one of the parts."""
    amiss, total = sum(each.amiss for part in parts for each in part), sum(map(len, parts))
    return min((amiss - sum(each.amiss for each in part)) / (total - len(part)) for part in parts)


# Where few events are wanted, no more than so many times the events asked for are read.
_STRETCH = 10

_COLUMNS = ("id", "tenant", "msg_id", "choice", "kind", "metric", "value", "text", "source", "received_at")

_FIRST = select(func.min(feedback.c.tenant).label("tenant")).cte("tenants", recursive=True)
_NEXT = select(func.min(feedback.c.tenant)).where(feedback.c.tenant > _FIRST.c.tenant).correlate(_FIRST)
# The last row has none: there is no next one.
_TENANTS = _FIRST.union_all(select(_NEXT.scalar_subquery()).where(_FIRST.c.tenant.is_not(None)))

_LEAST = select(func.min(feedback.c.key)).where(feedback.c.tenant == _TENANTS.c.tenant).correlate(_TENANTS)
_LEAST_OF_TENANTS = select(_TENANTS.c.tenant, _LEAST.scalar_subquery().label("key"))
_SOME = _LEAST_OF_TENANTS.where(_TENANTS.c.tenant.is_not(None)).cte("keys", recursive=True)
_GREATER = and_(feedback.c.tenant == _SOME.c.tenant, feedback.c.key > _SOME.c.key)
_NEXT_KEY = select(func.min(feedback.c.key)).where(_GREATER).correlate(_SOME).scalar_subquery()
# The last row of each tenant stands for its feedback without a key.
_KEYS = _SOME.union_all(select(_SOME.c.tenant, _NEXT_KEY).where(_SOME.c.key.is_not(None)))


# As the index is read backwards, also where the key is null: PostgreSQL does not know that all nulls are alike.
_BACKWARDS = (feedback.c.key.desc(), feedback.c.id.desc())


def _newest(same_key: ColumnElement[bool]) -> Any:
    same_tenant = feedback.c.tenant == _KEYS.c.tenant
    newest = select(feedback.c.id).where(same_tenant, same_key).order_by(*_BACKWARDS).limit(1)
    return newest.correlate(_KEYS).scalar_subquery()


_NEWEST = case((_KEYS.c.key.is_(None), _newest(feedback.c.key.is_(None))), else_=_newest(feedback.c.key == _KEYS.c.key))
_NEWEST_OF_KEYS = select(_KEYS.c.tenant, _KEYS.c.key, _NEWEST.label("newest"))


class KeyWithFeedback(NamedTuple):
    tenant: str
    key: str | None
    newest: int


def keys_with_feedback(read: Callable[[Any], Sequence[Any]]) -> list[KeyWithFeedback]:
    return [KeyWithFeedback(*row) for row in read(_NEWEST_OF_KEYS) if row.newest is not None]


def newest_of_key(of: KeyWithFeedback, wanted: ColumnElement[bool], count: int) -> Select[Any]:
    """The newest events of a key that are wanted, so many at most, the newest first."""
    same_key = feedback.c.key.is_(None) if of.key is None else feedback.c.key == of.key
    part = (
        select(feedback.c.id)
        .where(feedback.c.tenant == of.tenant, same_key)
        .order_by(*_BACKWARDS)
        .limit(count * _STRETCH)
        .subquery()
    )
    columns = (feedback.c[name] for name in _COLUMNS)
    return (
        select(*columns)
        .join(part, part.c.id == feedback.c.id)
        .order_by(feedback.c.id.desc())
        .where(wanted)
        .limit(count)
    )


#: Characters of a reply that are looked at.
LONGEST = 2000


# So many keys are looked at, of each tenant in turn the key with the latest event.
_MOST_KEYS = 100


class ReplyExcerpt(NamedTuple):
    """A reply's beginning, tool calls, and its request where calls or marks ask for it (None if damaged)."""

    text: str
    tool_calls: bytes | None
    request: bytes | None


class Drift(LedgerPart):
    def newest_replies(self, count: int, *, marks: Sequence[str] = (), policy: int = 0) -> list[ReplyExcerpt]:
        newest = select(experiences.c.id).where(experiences.c.correction == 0).order_by(experiences.c.id.desc())
        part = newest.limit(count * _STRETCH).subquery()
        columns = (experiences.c.msg_id, func.substr(experiences.c.text, 1, LONGEST), experiences.c.tool_calls)
        of_it = select(*columns).join(part, part.c.id == experiences.c.id).where(experiences.c.policy == policy)
        rows = self._read(of_it.order_by(experiences.c.id.desc()).limit(count))
        wanted = {msg_id for msg_id, text, calls in rows if calls or any(mark in text for mark in marks)}
        requests: dict[str, bytes] = {}
        asked = select(exchanges.c.msg_id, exchanges.c.request)
        for msg_id, request in find(self._read, asked, exchanges.c.msg_id, wanted):
            with suppress(ZstdError):  # damaged bytes must not stop a trainer
                requests[msg_id] = unpack_text(request)
        return [ReplyExcerpt(text, calls, requests.get(msg_id)) for msg_id, text, calls in rows]

    def largest_rater(self, count: int) -> float | None:
        """The share of the most frequent source among the newest `count` feedback events that name one."""
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
        """The part of the newest numbers under metrics that count that is beyond the clip, as voters share in it."""
        weights = {metric: weight for metric, weight in rule.weights.items() if weight}
        low, high = rule.clip or (-MAX_REWARD, MAX_REWARD)
        numbers = and_(feedback.c.kind == Kind.NUMBER, feedback.c.metric.in_(weights), ~_IS_QUARANTINED)
        events = (
            SuspectEvent(row.id, row.received_at, rater_of(row), not low <= weights[row.metric] * row.value <= high)
            for row in self._newest_of_voices(count, numbers)
        )
        return share_amiss(events, count)

    def _newest_of_voices(self, count: int, wanted: ColumnElement[bool]) -> Iterator[Any]:
        """The newest events of each key, `count` at least where it has them: a key with many events hides no other."""
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
