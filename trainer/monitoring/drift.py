"""Rules of the monitors: how far the model has drifted since its first steps, and whether that is an alarm.

Pure. A history holds each signal's values by step; a rule computes one figure and compares it with a threshold. Without
enough values a rule returns nothing, and an open alarm stays.

    step       1 … baseline | …  | last window steps
    compared   the mean of the first ones with the mean of the last ones; the two never overlap

The history also keeps each evaluation with the reward at its time. The alarm `reward_hack` compares pairs of them:

    step 40, score 0.80, reward 0.30    step 60, score 0.55, reward 0.70    rise 0.40, fall 0.25: reward hacking
"""

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import correlation, fmean, linear_regression
from typing import NamedTuple

import msgspec

from tuneloop.shared.operations.diagnosis import Code
from tuneloop.shared.settings.versions import DriftSettings

REWARD, LENGTH = "critic/rewards/mean", "response_length/mean"
ENTROPY = "actor/entropy"
KL, KL_BASE = "actor/kl_loss", "actor/kl_base"
#: The spread of a step's rewards, for methods that compare them; the share of its tokens without gradient.
SPREAD, IDLE = "reward/spread", "critic/advantages/zero"
LEVEL, EXTREME = "reward/level", "feedback/extreme"
REFUSALS, TOOL_ERRORS, RATER = "replies/refusals", "replies/tool_errors", "feedback/largest_rater"

SIGNALS = (REWARD, LENGTH, ENTROPY, KL, KL_BASE, REFUSALS, TOOL_ERRORS, RATER, LEVEL, EXTREME, SPREAD, IDLE)

#: Steps before training may count as not learning, and Student's t of the rewards' trend that a fall needs, which
#: chance exceeds once in a thousand.
_LEARNING_STEPS, _SURE = 10, 4.5

_LEAST_FALL = 0.05  # smaller falls, as a share of the reward, do not count
NOT_LEARNING = Code.NOT_LEARNING.value  # the alarm's name, and its code in the diagnosis
OF_EVALUATIONS = frozenset({"reward_hack", "degraded"})  # alarms that compare evaluations

_WINDOWS_OF_ROOM = 3  # windows kept before the compared ones: a trainer may go back some steps

_JUMP = 5  # fewest steps of a comparison: fewer batches differ by chance


class EvaluationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation after `step` steps, and the mean reward of the window before; None at step 0."""

    step: int
    score: float
    reward: float | None


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The rules' input, oldest first; `raised` maps open alarms to steps, `tasks` is the tasks' fingerprint."""

    series: dict[str, list[tuple[int, float]]] = {}
    scores: list[EvaluationPoint] = []
    raised: dict[str, int] = {}
    tasks: int | None = None


class DriftFinding(NamedTuple):
    """A monitor's figure, and whether it exceeds the threshold; `reason` is the alarm's sentence."""

    value: float
    threshold: float
    over: bool
    reason: str


def until(history: History, step: int) -> History:
    """The history after `step` steps, with all alarms: their readers have seen them."""
    return msgspec.structs.replace(
        history,
        series={name: [each for each in values if each[0] <= step] for name, values in history.series.items()},
        scores=[each for each in history.scores if each.step <= step],
        raised={name: min(raised, step) for name, raised in history.raised.items()},
    )


def with_step(drift: DriftSettings, history: History, step: int, signals: Mapping[str, float]) -> History:
    """The history with the step's signals; a signal measured at intervals holds until the next measurement."""
    series = dict(history.series)
    for name in SIGNALS:
        value = signals.get(name)
        if value is None and name == KL_BASE and KL not in signals and series.get(name):
            value = series[name][-1][1]
        if value is not None and math.isfinite(value):
            values = [*series.get(name, []), (step, value)]
            last = max(drift.window, 2 * _jump_steps(drift)) + _WINDOWS_OF_ROOM * drift.window
            series[name] = values[: drift.baseline] + values[drift.baseline :][-last:]
    return msgspec.structs.replace(history, series=series)


def with_score(drift: DriftSettings, history: History, step: int, score: float) -> History:
    rewards = [value for _, value in history.series.get(REWARD, [])][-drift.window :]
    new = EvaluationPoint(step=step, score=score, reward=fmean(rewards) if rewards else None)
    raised = [history.raised[name] for name in OF_EVALUATIONS if name in history.raised]
    since = min([step, *raised]) - drift.evaluation_window
    kept = [each for each in history.scores if since <= each.step < step]
    return msgspec.structs.replace(history, scores=[*kept, new])


def verdicts(drift: DriftSettings, history: History) -> dict[str, DriftFinding]:
    """The findings of monitors with enough values."""
    verdicts = ((name, rule(drift, history)) for name, rule in RULES.items())
    return {name: verdict for name, verdict in verdicts if verdict is not None}


def changes(history: History, found: Mapping[str, DriftFinding]) -> Iterator[tuple[str, bool]]:
    """Alarms to raise (True) and to clear; those of removed monitors are cleared."""
    for name, verdict in found.items():
        if verdict.over != (name in history.raised):
            yield name, verdict.over
    for name in history.raised:
        if name not in RULES:
            yield name, False


def _first_and_last(drift: DriftSettings, history: History, signal: str) -> tuple[float, float] | None:
    """The means of the baseline and of the last window after it, if both are full."""
    values = [value for _, value in history.series.get(signal, [])]
    later = values[drift.baseline :][-drift.window :]
    return (fmean(values[: drift.baseline]), fmean(later)) if len(later) == drift.window else None


def _times(signal: str, option: str, what: str) -> Callable[[DriftSettings, History], DriftFinding | None]:
    def rule(drift: DriftSettings, history: History) -> DriftFinding | None:
        means = _first_and_last(drift, history, signal)
        if means is None or means[0] <= 0:
            return None
        first, last = means
        most: float = getattr(drift, option)
        over = not first / most <= last <= first * most
        reason = f"{what} was {first:.4g} in the first {drift.baseline} steps, and is {last:.4g} in the last"
        return DriftFinding(last / first, most, over, f"{reason} {drift.window}")

    return rule


def _rise(signal: str, option: str, what: str) -> Callable[[DriftSettings, History], DriftFinding | None]:
    def rule(drift: DriftSettings, history: History) -> DriftFinding | None:
        means = _first_and_last(drift, history, signal)
        if means is None:
            return None
        first, last = means
        most: float = getattr(drift, option)
        reason = f"{what} was {first:.1%} in the first {drift.baseline} steps, and is {last:.1%} in the last"
        return DriftFinding(last - first, most, last - first > most, f"{reason} {drift.window}")

    return rule


def _level(signal: str, option: str, what: str) -> Callable[[DriftSettings, History], DriftFinding | None]:
    def rule(drift: DriftSettings, history: History) -> DriftFinding | None:
        values = [value for _, value in history.series.get(signal, [])][-drift.window :]
        last = fmean(values) if len(values) == drift.window else None
        if last is None:
            return None
        most: float = getattr(drift, option)
        return DriftFinding(last, most, last > most, f"{what} is {last:.4g} in the last {drift.window} steps")

    return rule


def _distance(drift: DriftSettings, history: History) -> DriftFinding | None:
    """Uses the newer of the two signals."""
    seen = {name: history.series[name][-1][0] for name in (KL, KL_BASE) if history.series.get(name)}
    signal = max(seen, key=seen.__getitem__, default=KL)
    return _level(signal, "kl", "the distance from the base model")(drift, history)


def _reward_hacking(drift: DriftSettings, history: History) -> DriftFinding | None:
    """The largest fall of the score since an evaluation after which the reward rose by more than `reward_rise`."""
    if len(history.scores) < 2:
        return None
    *earlier, now = history.scores
    rose, worst, reason = now.reward, 0.0, "the reward and the evaluation agree"
    if rose is None:
        return None
    first = [value for _, value in history.series.get(REWARD, [])][: min(drift.baseline, drift.window)]
    for then in earlier:
        # The base model's evaluation is compared with the rewards of the first steps.
        reward = (fmean(first) if first else None) if then.reward is None else then.reward
        fall = then.score - now.score
        if reward is not None and rose - reward > drift.reward_rise and fall > worst:
            worst = fall
            reason = (
                f"from step {then.step} to {now.step} the reward rose from {reward:.4g} to {rose:.4g}, but the score of"
                f" the evaluation fell from {then.score:.4g} to {now.score:.4g}"
            )
    return DriftFinding(worst, drift.evaluation_fall, worst > drift.evaluation_fall, reason)


def _jump_steps(drift: DriftSettings) -> int:
    return max(_JUMP, drift.window // 4)


def _jump(drift: DriftSettings, history: History) -> DriftFinding | None:
    """The change of the mean reward between the last two quarters of a window, up or down."""
    steps = _jump_steps(drift)
    values = [value for _, value in history.series.get(LEVEL, [])][-2 * steps :]
    if len(values) < 2 * steps:
        return None
    before, now = fmean(values[:steps]), fmean(values[steps:])
    reason = f"within {2 * steps} steps the mean reward went from {before:.1%} to {now:.1%} of what rewards can be"
    return DriftFinding(abs(now - before), drift.reward_jump, abs(now - before) > drift.reward_jump, reason)


def _not_learning(drift: DriftSettings, history: History) -> DriftFinding | None:
    """1 if the last steps had equal rewards or no advantage, or if their reward falls."""

    def last(signal: str) -> list[float]:
        return [value for _, value in history.series.get(signal, [])][-_LEARNING_STEPS:]

    rewards, steps = last(REWARD), f"the last {_LEARNING_STEPS} steps"
    if len(rewards) < _LEARNING_STEPS:
        return None
    reason = f"rewards differ and do not fall in {steps}"
    line = linear_regression(range(_LEARNING_STEPS), rewards)
    fall = -line.slope * (_LEARNING_STEPS - 1)
    explained = correlation(range(_LEARNING_STEPS), rewards) ** 2 if len(set(rewards)) > 1 else 0.0
    least = _SURE / 2 if NOT_LEARNING in history.raised else _SURE  # hysteresis
    is_sure = explained * (_LEARNING_STEPS - 2) > least**2 * (1 - explained)
    over = True
    if math.isclose(min(rewards), max(rewards)) and last(SPREAD) == [0.0] * _LEARNING_STEPS:
        reason = (
            f"all rewards of {steps} are {rewards[0]:.4g}, so that no reply is better than another: give feedback that"
            " distinguishes good replies, or harder tasks"
        )
    elif last(IDLE) == [1.0] * _LEARNING_STEPS:
        reason = (
            f"100% of the tokens of {steps} have advantage 0, or are masked: reward the replies of a task differently,"
            " and see off_policy/outside"
        )
    elif is_sure and fall > _LEAST_FALL * max(map(abs, rewards)):
        reason = (
            f"the mean reward fell from {line.intercept:.4g} to {line.intercept - fall:.4g} in {steps}: lower"
            " algorithm.optimizer.lr, raise algorithm.kl_coef, and see whether tasks or feedback have changed"
        )
    else:
        over = False
    return DriftFinding(float(over), 0.0, over, reason)


def _fall_below_best(drift: DriftSettings, history: History) -> DriftFinding | None:
    if len(history.scores) < 2:
        return None
    best, now = max(history.scores, key=lambda each: each.score), history.scores[-1]
    reason = f"the score of the evaluation was {best.score:.4g} at step {best.step}, and is {now.score:.4g} now"
    return DriftFinding(best.score - now.score, drift.degraded, best.score - now.score > drift.degraded, reason)


RULES: Mapping[str, Callable[[DriftSettings, History], DriftFinding | None]] = {
    "reward_hack": _reward_hacking,
    "reply_length": _times(LENGTH, "reply_length", "the mean length of replies"),
    "entropy": _times(ENTROPY, "entropy", "the policy's entropy"),
    "kl": _distance,
    "refusals": _rise(REFUSALS, "refusals", "the share of replies that refuse"),
    "tool_errors": _rise(TOOL_ERRORS, "tool_errors", "the share of wrong tool calls"),
    "reward_jump": _jump,
    "extreme_rewards": _level(EXTREME, "extreme_rewards", "the share of numbers beyond reward.clip"),
    "degraded": _fall_below_best,
    NOT_LEARNING: _not_learning,
    "single_rater": _level(RATER, "single_rater", "the share of feedback that one source gives"),
}
