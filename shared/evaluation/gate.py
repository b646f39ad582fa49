"""What a candidate must show before it serves any request, decided from figures alone. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tuneloop.shared.evaluation.scores import LENGTH, MALFORMED, REFUSALS, SCORE, TASKS, Figure
from tuneloop.shared.experience import Evaluator
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import GateSettings

# What rounding makes of two means that are as far apart as they may be.
_ROUNDING = 1e-9

# Metrics that a verdict reports in words of its own, or not at all.
_NOT_COMPARED = (TASKS,)

_Values = Mapping[tuple[str, str], float]


class GateVerdict(NamedTuple):
    passed: bool
    reasons: tuple[str, ...]
    figures: dict[str, Any]

    def details(self, champion: int) -> dict[str, Any]:
        return {"instead_of": champion, "passed": self.passed, **self.figures}

    def reason(self, champion: int) -> str:
        return "; ".join(self.reasons) or f"no worse than version {champion}"


def evaluator_of(settings: Settings) -> Evaluator:
    """Who evaluates: where no engine is free for a candidate, the trainer does it in its own process."""
    return Evaluator.ENGINE if settings.engine_places > 1 else Evaluator.TRAINER


def same_tasks(one: Iterable[Figure], other: Iterable[Figure]) -> bool:
    """Whether both were evaluated on the same tasks by the same judge; not where one was on none."""
    fingerprint = _values_by_slice(one).get((TASKS, ""))
    return fingerprint is not None and fingerprint == _values_by_slice(other).get((TASKS, ""))


def gate_verdict(gate: GateSettings, candidate: Iterable[Figure], champion: Iterable[Figure]) -> GateVerdict:
    """Compare the figures of one evaluator on the same tasks; a value exactly at its bound passes.

    The candidate fails if its score is more than `margin` below the champion's, or a slice's more than `slice_margin`.
    It also fails if its replies are more than `reply_length` times as long or short, or if its share of refusals
    (`refusals`) or malformed replies (`format`) rises by more than the bound.
    """
    new, old = _values_by_slice(candidate), _values_by_slice(champion)
    reasons = tuple(_failed_checks(gate, new, old))
    return GateVerdict(not reasons, reasons, {"candidate": _values_by_name(new), "champion": _values_by_name(old)})


def _failed_checks(gate: GateSettings, new: _Values, old: _Values) -> Iterator[str]:
    for (metric, part), before in sorted(old.items()):
        now = new.get((metric, part))
        margin = gate.slice_margin if part else gate.margin
        if metric == SCORE and now is not None and _exceeds(before - now, margin):
            of = f"score on the slice {part}" if part else "score"
            yield f"its {of} is {now:.4g}, the champion's {before:.4g}: more than {margin:g} below"
    length, before = new.get((LENGTH, ""), 0.0), old.get((LENGTH, ""), 0.0)
    if before > 0:
        times = length / before
        if _exceeds(times, gate.reply_length) or _exceeds(1, times * gate.reply_length):
            yield (
                f"its replies have {length:.4g} tokens, the champion's {before:.4g}: more than {gate.reply_length:g}"
                " times as many or as few"
            )
    shares = ((REFUSALS, "refuse", gate.refusals), (MALFORMED, "lack the form that their task demands", gate.format))
    for metric, do, allowed in shares:
        share, was = new.get((metric, ""), 0.0), old.get((metric, ""), 0.0)
        if _exceeds(share - was, allowed):
            yield f"{share:.1%} of its replies {do}, {was:.1%} of the champion's: more than allowed"


def _exceeds(value: float, bound: float) -> bool:
    return value > bound + _ROUNDING


def _values_by_slice(figures: Iterable[Figure]) -> dict[tuple[str, str], float]:
    return {(each.metric, each.slice): each.value for each in figures}


def _values_by_name(values: _Values) -> dict[str, float]:
    compared = {key: value for key, value in values.items() if key[0] not in _NOT_COMPARED}
    return {f"{metric}/{part}" if part else metric: value for (metric, part), value in compared.items()}
