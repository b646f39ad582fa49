"""Who gave feedback: the raters behind sources, and those in quarantine."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import Connection, select

from tuneloop.shared.experience import KEY_SOURCE
from tuneloop.shared.ledger.storage.database import is_among, portions
from tuneloop.shared.ledger.storage.schema import RaterState, raters

#: What a rater is known by: a tenant and a source, which is empty for feedback that names none.
Rater = tuple[str, str]


def voice_of(source: str) -> str:
    """Who is behind a source: the key for all names that are used with it, else the name itself.

    >>> voice_of("key:web/ann"), voice_of("key:web"), voice_of("ann")
    ('key:web', 'key:web', 'ann')
    """
    return source.split("/", 1)[0] if source.startswith(KEY_SOURCE) else source


def voter_of(source: str) -> str:
    """The name of the one voter that all sources of a voice are.

    >>> voter_of("key:web/ann"), voter_of("ann")
    ('key:web/', 'ann')
    """
    return f"{voice_of(source)}/" if source.startswith(KEY_SOURCE) else source


def median_by_voice(values: Iterable[tuple[object, float, float]]) -> float:
    """The weighted median of what each voice says: of voices, values and weights above 0.

    A voice says the median of its values, weighted likewise, with the largest of their weights. Where what is below and
    what is above weigh the same, it is the mean of the two values between.

    >>> median_by_voice([("eve", -1.0, 1.0), ("eve", -1.0, 1.0), ("ann", 1.0, 1.0), ("bob", 1.0, 1.0)])
    1.0
    >>> median_by_voice([("eve", -1.0, 0.1), ("ann", 1.0, 1.0)])
    1.0
    """
    said: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for voice, value, weight in values:
        said[voice].append((value, weight))
    return _weighted_median((_weighted_median(each), max(weight for _, weight in each)) for each in said.values())


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    ordered = sorted(values)
    half, below = math.fsum(weight for _, weight in ordered) / 2, 0.0
    for place, (value, weight) in enumerate(ordered):
        below += weight
        if math.isclose(below, half):
            return (value + ordered[place + 1][0]) / 2
        if below > half:
            return value
    raise ValueError("the median of nothing")


#: Those in quarantine among the raters with these `names`, of any tenant.
QUARANTINED = select(raters.c.tenant, raters.c.name).where(
    raters.c.state == RaterState.QUARANTINED, is_among(raters.c.name, "names")
)


def rater_of(event: Any) -> Rater:
    """Who gave a feedback event."""
    return event.tenant, event.source or ""


def without_quarantined(connection: Connection, events: Collection[Any]) -> list[Any]:
    """The events but those of raters in quarantine."""
    names = {name for _, name in map(rater_of, events)}
    quarantined = {tuple(row) for some in portions(names) for row in connection.execute(QUARANTINED, {"names": some})}
    return [event for event in events if rater_of(event) not in quarantined]
