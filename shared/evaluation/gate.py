"""What a candidate must show before it serves any request, decided from figures alone. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tuneloop.shared.evaluation.off_policy import (
    MIN_EFFECTIVE_SIZE,
    REPLAY_METRICS,
    ReplayPair,
    is_replay_against,
    replay_pairs,
)
from tuneloop.shared.evaluation.scores import KL, KL_AGAINST, LENGTH, MALFORMED, REFUSALS, SCORE, TASKS, Figure
from tuneloop.shared.experience import Evaluator
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import GateSettings

# What rounding makes of two means that are as far apart as they may be.
_ROUNDING = 1e-9

# Metrics that a verdict reports in words of its own, or not at all.
_NOT_COMPARED = (TASKS, KL_AGAINST, *REPLAY_METRICS)

_Values = Mapping[tuple[str, str], float]


class GateVerdict(NamedTuple):
    """Whether a candidate passed, why not, and the figures of both versions by name, as they go into an event."""

    passed: bool
    reasons: tuple[str, ...]
    figures: dict[str, Any]

    def details(self, champion: int) -> dict[str, Any]:
        """The details of an evaluation's event, against that champion."""
        return {"instead_of": champion, "passed": self.passed, **self.figures}

    def reason(self, champion: int) -> str:
        """Why it passed, or did not, against that champion."""
        if self.reasons:
            return "; ".join(self.reasons)
        replay = self.figures.get("replay")
        if replay is None or replay["concluded"]:
            return f"no worse than version {champion}"
        worth = f"{replay['replies']} held-out replies are worth {replay['size']:.4g} rewards"
        return (
            f"no figure is worse than version {champion}'s; the replay is inconclusive: {worth},"
            f" {MIN_EFFECTIVE_SIZE:g} are needed"
        )


def evaluator_of(settings: Settings) -> Evaluator:
    """Who evaluates: where no engine is free for a candidate, the trainer does it in its own process.

    Figures of the one are never compared with those of the other.
    """
    return Evaluator.ENGINE if settings.engine_places > 1 else Evaluator.TRAINER


def same_tasks(one: Iterable[Figure], other: Iterable[Figure]) -> bool:
    """Whether both were evaluated on the same tasks by the same judge; not where one was on none."""
    fingerprint = _values_by_slice(one).get((TASKS, ""))
    return fingerprint is not None and fingerprint == _values_by_slice(other).get((TASKS, ""))


def is_beside(gate: GateSettings, figures: Sequence[Figure], champion: int) -> bool:
    """Whether all that is measured of a candidate beside a champion was, and beside this one."""
    measured = gate.kl is None or any(each.metric == KL_AGAINST and each.value == champion for each in figures)
    return measured and (not gate.replays or is_replay_against(figures, champion))


def gate_verdict(gate: GateSettings, candidate: Iterable[Figure], champion: Iterable[Figure]) -> GateVerdict:
    """Compare the figures of the same evaluator on the same tasks.

    The candidate passes unless its score lies more than `margin` below the champion's, that of a slice more than
    `slice_margin`, its replies are more than `reply_length` times as long or as short, the share that refuses is more
    than `refusals` higher, or that lacks its form more than `format`, or it is more than `kl` away, or would have
    earned more than `replay.margin` less on held-out replies. What is exactly at its bound passes. A threshold of null
    is not checked, nor is a distance that was not measured, nor a replay of too few replies.
    """
    figures_of_candidate = tuple(candidate)
    new, old, replay = (
        _values_by_slice(figures_of_candidate),
        _values_by_slice(champion),
        tuple(replay_pairs(figures_of_candidate)) if gate.replays else (),
    )
    reasons = (*_failed_checks(gate, new, old), *_failed_replays(gate, replay))
    figures = {"candidate": _values_by_name(new), "champion": _values_by_name(old)}
    return GateVerdict(not reasons, reasons, figures | ({"replay": _replay_details(replay)} if gate.replays else {}))


def _failed_checks(gate: GateSettings, new: _Values, old: _Values) -> Iterator[str]:
    yield from _scores(gate, new, old)
    length, before = new.get((LENGTH, ""), 0.0), old.get((LENGTH, ""), 0.0)
    if gate.reply_length is not None and before > 0:
        times = length / before
        if _exceeds(times, gate.reply_length) or _exceeds(1, times * gate.reply_length):
            yield (
                f"its replies have {length:.4g} tokens, the champion's {before:.4g}: more than {gate.reply_length:g}"
                " times as many or as few"
            )
    shares = ((REFUSALS, "refuse", gate.refusals), (MALFORMED, "lack the form that their task demands", gate.format))
    for metric, do, allowed in shares:
        share, was = new.get((metric, ""), 0.0), old.get((metric, ""), 0.0)
        if allowed is not None and _exceeds(share - was, allowed):
            yield f"{share:.1%} of its replies {do}, {was:.1%} of the champion's: more than allowed"
    distance = new.get((KL, ""))
    if gate.kl is not None and distance is not None and _exceeds(distance, gate.kl):
        yield f"it is {distance:.4g} nats a token from the champion; allowed: {gate.kl:g}"


def _scores(gate: GateSettings, new: _Values, old: _Values) -> Iterator[str]:
    for (metric, part), before in sorted(old.items()):
        now = new.get((metric, part))
        margin = gate.slice_margin if part else gate.margin
        if metric == SCORE and now is not None and _exceeds(before - now, margin):
            of = f"score on the slice {part}" if part else "score"
            yield f"its {of} is {now:.4g}, the champion's {before:.4g}: more than {margin:g} below"


def _failed_replays(gate: GateSettings, replay: Sequence[ReplayPair]) -> Iterator[str]:
    for part in replay:
        margin = gate.replay.slice_margin if part.slice else gate.replay.margin
        if part.concludes and _exceeds(part.champion - part.candidate, margin):
            of = f"on the slice {part.slice} of" if part.slice else "on"
            yield (
                f"{of} held-out replies it would earn {part.candidate:.4g}, the champion {part.champion:.4g}: more"
                f" than {margin:g} below"
            )


def _replay_details(replay: Sequence[ReplayPair]) -> dict[str, Any]:
    """All replies, and the slices of which something is concluded."""
    nothing: dict[str, Any] = {"replies": 0, "size": 0.0, "concluded": False}
    by_slice = {
        part.slice: {
            "replies": part.replies,
            "size": part.size,
            "concluded": part.concludes,
            "candidate": part.candidate,
            "champion": part.champion,
        }
        for part in replay
    }
    slices = {name: each for name, each in by_slice.items() if name and each["concluded"]}
    return by_slice.get("", nothing) | {"needed": MIN_EFFECTIVE_SIZE} | ({"slices": slices} if slices else {})


def _exceeds(value: float, bound: float) -> bool:
    return value > bound + _ROUNDING


def _values_by_slice(figures: Iterable[Figure]) -> dict[tuple[str, str], float]:
    return {(each.metric, each.slice): each.value for each in figures}


def _values_by_name(values: _Values) -> dict[str, float]:
    compared = {key: value for key, value in values.items() if key[0] not in _NOT_COMPARED}
    return {f"{metric}/{part}" if part else metric: value for (metric, part), value in compared.items()}
