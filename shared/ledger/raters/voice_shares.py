"""Which part of the newest feedback is amiss, where no voice alone can make it look so. Pure.

A voice is all that is said with one key, or in one name without a key. Who says more counts no more than others:

    three voices or more    the newest events of each, as many of one as of another; without the voice that has most of
                            what is amiss, and of three tenants without the one that has
    one or two              the newest events, whoever said them: there is nobody else to go by
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tuneloop.shared.ledger.raters.voices import Rater, voice_of

#: From so many voices, or tenants, on, one alone raises nothing.
MANY = 3

#: The part of the events looked at that one voice may always have.
LEAST_PART = 1 / 20

#: A voice that says nothing for so many seconds, a week, is one no more.
SILENT_S = 7 * 86400.0


class SuspectEvent(NamedTuple):
    """An event: its place in the ledger, when it came, by whom, and whether it is `amiss`."""

    id: int
    received_at: float
    rater: Rater
    amiss: bool


def most_of_one(count: int, voices: int) -> int:
    """How many events of one voice count, where `count` of all voices are looked at."""
    return max(1, int(count * LEAST_PART), count // voices)


def share_amiss(events: Iterable[SuspectEvent], count: int) -> float | None:
    """The share of what is amiss, by `count` events or about so many; None if there are fewer."""
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
