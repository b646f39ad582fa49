"""What a candidate must show before it answers anybody, decided from figures alone. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tuneloop.shared.evaluation.off_policy import LEAST_SIZE, OF_A_REPLAY, Pair, pairs
from tuneloop.shared.evaluation.scores import KL, LENGTH, MALFORMED, REFUSALS, SCORE, TASKS, Figure
from tuneloop.shared.experience import Evaluator
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import GateSettings

# What rounding makes of two means that are as far apart as they may be.
_ROUNDING = 1e-9

# What is told of in words of its own, or not at all.
_APART = (TASKS, *OF_A_REPLAY)

_Known = Mapping[tuple[str, str], float]


class Verdict(NamedTuple):
    """Whether a candidate passed, why not, and the figures of both versions by name, as they go into an event."""

    passed: bool
    reasons: tuple[str, ...]
    figures: dict[str, Any]

    def details(self, champion: int) -> dict[str, Any]:
        """What an evaluation's event says of it, beside that champion."""
        return {"instead_of": champion, "passed": self.passed, **self.figures}

    def reason(self, champion: int) -> str:
        """Why it passed, or did not, beside that champion."""
        if self.reasons:
            return "; ".join(self.reasons)
        told = self.figures.get("replay")
        if told is None or told["concluded"]:
            return f"no worse than version {champion}"
        few = f"{told['replies']} held-out replies are worth {told['size']:.4g} rewards, {LEAST_SIZE:g} are needed"
        return f"nothing is known to be worse than version {champion}; the replay concludes nothing: {few}"


def evaluator_of(settings: Settings) -> Evaluator:
    """Who evaluates: where there is no place to try a candidate, the trainer does it in its own process.

    Figures of the one are never compared with those of the other.
    """
    return Evaluator.ENGINE if settings.engine_places > 1 else Evaluator.TRAINER


def same_tasks(one: Iterable[Figure], other: Iterable[Figure]) -> bool:
    """Whether both were asked the same, and judged alike; so not where one was asked nothing."""
    asked = _known(one).get((TASKS, ""))
    return asked is not None and asked == _known(other).get((TASKS, ""))


def judge(gate: GateSettings, candidate: Iterable[Figure], champion: Iterable[Figure]) -> Verdict:
    """Compare the figures of the same evaluator on the same tasks.

    The candidate passes unless its score lies more than `margin` below the champion's, that of a slice more than
    `slice_margin`, its replies are more than `reply_length` times as long or as short, the share that refuses is more
    than `refusals` higher, or that lacks its form more than `format`, or it is more than `kl` away, or would have
    earned more than `replay.margin` less on held-out replies. What is exactly at its bound passes. A threshold of null
    is not looked at, nor is a distance that nobody measured, nor a replay of too few replies.
    """
    said = tuple(candidate)
    new, old, replay = _known(said), _known(champion), tuple(pairs(said)) if gate.replays else ()
    reasons = (*_complaints(gate, new, old), *_earnings(gate, replay))
    figures = {"candidate": _named(new), "champion": _named(old)}
    return Verdict(not reasons, reasons, figures | ({"replay": _of_replay(replay)} if gate.replays else {}))


def _complaints(gate: GateSettings, new: _Known, old: _Known) -> Iterator[str]:
    yield from _scores(gate, new, old)
    length, before = new.get((LENGTH, ""), 0.0), old.get((LENGTH, ""), 0.0)
    if gate.reply_length is not None and before > 0:
        times = length / before
        if _over(times, gate.reply_length) or _over(1, times * gate.reply_length):
            yield (
                f"its replies have {length:.4g} tokens, the champion's {before:.4g}: more than {gate.reply_length:g}"
                " times as many or as few"
            )
    shares = ((REFUSALS, "refuse", gate.refusals), (MALFORMED, "lack the form that their task demands", gate.format))
    for metric, do, allowed in shares:
        share, was = new.get((metric, ""), 0.0), old.get((metric, ""), 0.0)
        if allowed is not None and _over(share - was, allowed):
            yield f"{share:.1%} of its replies {do}, {was:.1%} of the champion's: more than allowed"
    distance = new.get((KL, ""))
    if gate.kl is not None and distance is not None and _over(distance, gate.kl):
        yield f"it is {distance:.4g} nats a token from the champion; allowed: {gate.kl:g}"


def _scores(gate: GateSettings, new: _Known, old: _Known) -> Iterator[str]:
    for (metric, part), before in sorted(old.items()):
        now = new.get((metric, part))
        margin = gate.slice_margin if part else gate.margin
        if metric == SCORE and now is not None and _over(before - now, margin):
            of = f"score on the slice {part}" if part else "score"
            yield f"its {of} is {now:.4g}, the champion's {before:.4g}: more than {margin:g} below"


def _earnings(gate: GateSettings, replay: Sequence[Pair]) -> Iterator[str]:
    for part in replay:
        margin = gate.replay.slice_margin if part.slice else gate.replay.margin
        if part.concludes and _over(part.champion - part.candidate, margin):
            of = f"on the slice {part.slice} of" if part.slice else "on"
            yield (
                f"{of} held-out replies it would earn {part.candidate:.4g}, the champion {part.champion:.4g}: more"
                f" than {margin:g} below"
            )


def _of_replay(replay: Sequence[Pair]) -> dict[str, Any]:
    """All replies, and the slices of which something is concluded."""
    nothing: dict[str, Any] = {"replies": 0, "size": 0.0, "concluded": False}
    told = {
        part.slice: {
            "replies": part.replies,
            "size": part.size,
            "concluded": part.concludes,
            "candidate": part.candidate,
            "champion": part.champion,
        }
        for part in replay
    }
    slices = {name: each for name, each in told.items() if name and each["concluded"]}
    return told.get("", nothing) | {"needed": LEAST_SIZE} | ({"slices": slices} if slices else {})


def _over(value: float, bound: float) -> bool:
    return value > bound + _ROUNDING


def _known(figures: Iterable[Figure]) -> dict[tuple[str, str], float]:
    return {(each.metric, each.slice): each.value for each in figures}


def _named(known: _Known) -> dict[str, float]:
    told = {key: value for key, value in known.items() if key[0] not in _APART}
    return {f"{metric}/{part}" if part else metric: value for (metric, part), value in told.items()}
