"""Who is behind a source, and what several of them say together. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from tuneloop.shared.experience import KEY_SOURCE

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


def median_by_voice(values: Iterable[tuple[object, float]]) -> float:
    """The median of what each voice says, that of one voice being the median of its values.

    >>> median_by_voice([("eve", -1.0), ("eve", -1.0), ("eve", -1.0), ("ann", 1.0), ("bob", 1.0)])
    1.0
    """
    voices: dict[object, list[float]] = defaultdict(list)
    for voice, value in values:
        voices[voice].append(value)
    return median(median(each) for each in voices.values())
