"""How far each rater can be relied on, by the verdicts of others on the same replies. Pure.

A rater agrees with the others about a reply as far as their verdicts are alike: 1 where they are the same, 0 where they
are as far apart as verdicts under that metric are. The verdict of the others is their median, in which each counts by
its own reliability, so that both are found together, in rounds. Where a trusted rater has judged, that is the verdict.

    reliability  r = (sum of agreements + 1) / (comparisons + 2), 0.5 for somebody of whom nothing is known
    weight       log(r / (1 - r)), the one that makes the fewest errors (Nitzan and Paroush, Optimal decision rules in
                 uncertain dichotomous choice situations, International Economic Review 23, 1982); LEAST_WEIGHT for who
                 has been compared fewer than KNOWN times or is no better than a coin

One says nothing of a rater whom it alone can be compared with: of two who differ nobody knows who is wrong.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

#: What a rater is known by: a tenant and a source, which is empty for feedback that names none.
Rater = tuple[str, str]

#: The weight of a rater of whom little is known: many of them together stand against one who has proved right.
LEAST_WEIGHT = 0.02

#: So many comparisons make a rater known.
KNOWN = 5

_ROUNDS = 6


class Opinion(NamedTuple):
    """What a rater says, and how much that counts among others."""

    value: float
    weight: float


#: What begins the sources of who has a key, and what stands between its name and that of whom it speaks for.
_KEY, _OF_KEY = "key:", "/"


def voice_of(source: str) -> str:
    """Who is behind a source: the key for all names that are used with it, else the name itself.

    >>> voice_of("key:web/ann"), voice_of("key:web"), voice_of("ann")
    ('key:web', 'key:web', 'ann')
    """
    return source.split(_OF_KEY, 1)[0] if source.startswith(_KEY) else source


class RaterVerdict(NamedTuple):
    """What a rater last said of a reply; `subject` is the same for all that can be compared."""

    rater: Rater
    subject: tuple[str, str, int | None]
    metric: str
    value: float


class RaterFigures(NamedTuple):
    """How a rater agrees with others; `agreement` is the mean over the comparisons, 0 where there are none."""

    compared: int = 0
    agreement: float = 0.0

    @property
    def reliability(self) -> float:
        """The chance to be right, from 0 to 1."""
        return (self.agreement * self.compared + 1) / (self.compared + 2)

    @property
    def weight(self) -> float:
        """How much the rater counts among others."""
        return weight_of(self.reliability, self.compared)

    @property
    def highest(self) -> float:
        """The highest agreement that chance leaves probable: two standard errors above the mean."""
        return self.agreement + 1 / math.sqrt(self.compared) if self.compared else 1.0


def weight_of(reliability: float, compared: int) -> float:
    """How much a rater counts among others."""
    if compared < KNOWN or reliability <= 0.5:
        return LEAST_WEIGHT
    return max(LEAST_WEIGHT, math.log(reliability / (1 - reliability)))


def together(opinions: Sequence[Opinion]) -> float:
    """The weighted median, that is half way between two that share the middle; of fewer than three the weighted mean.

    >>> together([Opinion(1.0, 2.0), Opinion(0.0, 2.0), Opinion(-1.0, 2.0)])
    0.0
    """
    total = sum(each.weight for each in opinions)
    if len(opinions) < 3:
        mean = sum(each.value * (each.weight / total) for each in opinions)
        return min(max(mean, min(opinions).value), max(opinions).value)
    below = 0.0
    ordered = sorted(opinions)
    for number, each in enumerate(ordered):
        below += each.weight
        if math.isclose(2 * below, total):
            return (each.value + ordered[number + 1].value) / 2
        if 2 * below > total:
            return each.value
    raise AssertionError("all weights together are more than half of themselves")


def by_voice(opinions: Iterable[tuple[object, Opinion]]) -> float:
    """What opinions make together, all of one voice being one; if there is but one voice, each for itself."""
    voices: dict[object, list[Opinion]] = defaultdict(list)
    for voice, opinion in opinions:
        voices[voice].append(opinion)
    if len(voices) == 1:
        return together(*voices.values())
    return together([Opinion(together(each), max(one.weight for one in each)) for each in voices.values()])


def figures(
    verdicts: Iterable[RaterVerdict], *, trusted: Container[Rater] = (), ignored: Collection[Rater] = ()
) -> dict[Rater, RaterFigures]:
    """The figures of all who gave the verdicts. Those `ignored` are compared, but do not count."""
    by_subject: dict[tuple[object, str], dict[Rater, float]] = defaultdict(dict)
    for verdict in verdicts:
        by_subject[verdict.subject, verdict.metric][verdict.rater] = verdict.value
    found = dict.fromkeys((rater for each in by_subject.values() for rater in each), RaterFigures())
    ranges = _ranges(by_subject, trusted)
    weights: Mapping[Rater, float] = dict.fromkeys(found, LEAST_WEIGHT)
    for _ in range(_ROUNDS):
        agreed: dict[Rater, list[float]] = defaultdict(list)
        for (_, metric), by_rater in by_subject.items():
            for rater, value in by_rater.items():
                others = _others(rater, by_rater, trusted, ignored)
                if others and ranges[metric] > 0:
                    verdict_of_others = by_voice(
                        (_voice(each), Opinion(by_rater[each], weights[each])) for each in others
                    )
                    agreed[rater].append(1 - min(1.0, abs(value - verdict_of_others) / ranges[metric]))
        found |= {rater: RaterFigures(len(each), sum(each) / len(each)) for rater, each in agreed.items()}
        weights = {rater: each.weight for rater, each in found.items()}
    return found


def _others(
    rater: Rater, by_rater: Mapping[Rater, float], trusted: Container[Rater], ignored: Collection[Rater]
) -> list[Rater]:
    """Whom a rater is compared with on one reply; nobody if they are too few.

    Of two keys nobody knows which is wrong, however many names one uses. The names of one key are compared with one
    another only where no other key is heard.
    """
    heard = [each for each in by_rater if each != rater and each not in ignored]
    golden = [each for each in heard if each in trusted]
    foreign = [each for each in heard if _voice(each) != _voice(rater)]
    others = foreign or heard
    several = len(set(map(_voice, foreign)) if foreign else heard) > 1
    return golden or (others if several else [])


def _voice(rater: Rater) -> Rater:
    return rater[0], voice_of(rater[1])


def _ranges(
    by_subject: Mapping[tuple[object, str], Mapping[Rater, float]], trusted: Container[Rater]
) -> dict[str, float]:
    """How far verdicts under each metric are apart: of replies that several have judged, or a trusted rater.

    Those of all together, and not what one has said alone, or it could be stretched by who says the most absurd.
    """
    middles: dict[str, list[float]] = defaultdict(list)
    for (_, metric), by_rater in by_subject.items():
        golden = [Opinion(value, 1.0) for rater, value in by_rater.items() if rater in trusted]
        voices = set(map(_voice, by_rater))
        several = [Opinion(value, 1.0) for value in by_rater.values()] if len(voices) > 1 else []
        middles[metric] += [together(golden or several)] if golden or several else []
    return {metric: max(values) - min(values) if values else 0.0 for metric, values in middles.items()}
