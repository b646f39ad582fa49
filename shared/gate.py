"""What a candidate must show before it answers anybody, decided from figures alone. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from shared.config import Settings
from shared.config_rollout import Gate
from shared.evaluation_figures import KL, LENGTH, REFUSALS, SCORE, TASKS, Figure
from shared.experience import Evaluator

# What rounding makes of two means that are as far apart as they may be.
_ROUNDING = 1e-9

_Known = Mapping[tuple[str, str], float]


class Verdict(NamedTuple):
    """Whether a candidate passed, why not, and the figures of both versions by name, as they go into an event."""

    passed: bool
    reasons: tuple[str, ...]
    figures: dict[str, Any]


def evaluator_of(settings: Settings) -> Evaluator:
    """Who evaluates: where there is no place to try a candidate, the trainer does it in its own process.

    Figures of the one are never compared with those of the other.
    """
    return Evaluator.ENGINE if settings.engine_places > 1 else Evaluator.TRAINER


def same_tasks(one: Iterable[Figure], other: Iterable[Figure]) -> bool:
    """Whether both were asked the same, and judged alike; so not where one was asked nothing."""
    asked = _known(one).get((TASKS, ""))
    return asked is not None and asked == _known(other).get((TASKS, ""))


def judge(gate: Gate, candidate: Iterable[Figure], champion: Iterable[Figure]) -> Verdict:
    """Compare the figures of the same evaluator on the same tasks.

    The candidate passes unless its score lies more than `margin` below the champion's, that of a slice more than
    `slice_margin`, its replies are more than `reply_length` times as long or as short, the share that refuses is more
    than `refusals` higher, or it is more than `kl` away. What is exactly at its bound passes. A threshold of null is
    not looked at, nor is a distance that nobody measured.
    """
    new, old = _known(candidate), _known(champion)
    reasons = tuple(_complaints(gate, new, old))
    return Verdict(not reasons, reasons, {"candidate": _named(new), "champion": _named(old)})


def _complaints(gate: Gate, new: _Known, old: _Known) -> Iterator[str]:
    yield from _scores(gate, new, old)
    length, before = new.get((LENGTH, ""), 0.0), old.get((LENGTH, ""), 0.0)
    if gate.reply_length is not None and before > 0:
        times = length / before
        if _over(times, gate.reply_length) or _over(1, times * gate.reply_length):
            yield (
                f"its replies have {length:.4g} tokens, the champion's {before:.4g}: more than {gate.reply_length:g}"
                " times as many or as few"
            )
    refusals = new.get((REFUSALS, ""), 0.0), old.get((REFUSALS, ""), 0.0)
    if gate.refusals is not None and _over(refusals[0] - refusals[1], gate.refusals):
        yield f"{refusals[0]:.1%} of its replies refuse, {refusals[1]:.1%} of the champion's: more than allowed"
    distance = new.get((KL, ""))
    if gate.kl is not None and distance is not None and _over(distance, gate.kl):
        yield f"it is {distance:.4g} nats a token from the champion; allowed: {gate.kl:g}"


def _scores(gate: Gate, new: _Known, old: _Known) -> Iterator[str]:
    for (metric, part), before in sorted(old.items()):
        now = new.get((metric, part))
        margin = gate.slice_margin if part else gate.margin
        if metric == SCORE and now is not None and _over(before - now, margin):
            of = f"score on the slice {part}" if part else "score"
            yield f"its {of} is {now:.4g}, the champion's {before:.4g}: more than {margin:g} below"


def _over(value: float, bound: float) -> bool:
    return value > bound + _ROUNDING


def _known(figures: Iterable[Figure]) -> dict[tuple[str, str], float]:
    return {(each.metric, each.slice): each.value for each in figures}


def _named(known: _Known) -> dict[str, float]:
    return {f"{metric}/{part}" if part else metric: value for (metric, part), value in known.items() if metric != TASKS}
