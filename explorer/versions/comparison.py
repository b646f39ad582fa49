"""Whether a version that is being tried is better than the champion, worse, or neither yet."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from tuneloop.explorer.versions.sequential_tests import (
    LEAST_REPLIES,
    LEAST_UNITS,
    Contrast,
    contrast,
    exceeds,
    largest_allowed,
    scale,
)
from tuneloop.shared.evaluation.samples import Figures, SampleStatistics, Share
from tuneloop.shared.settings.versions import RolloutSettings

_Action = Literal["promote", "roll_back", "wait"]


class RolloutDecision(NamedTuple):
    """What becomes of the version that is tried; `details` are the figures behind the reason, fit for JSON."""

    action: _Action
    reason: str
    details: Mapping[str, Any]


def decide(rollout: RolloutSettings, champion: Figures, tried: Figures, *, elapsed_s: float) -> RolloutDecision:
    """What is to be done now, `elapsed_s` after the rollout began. It may be asked as often as one likes.

    A version that breaks a guard or earns less is rolled back at once, and one that earns more is promoted; the end of
    the window decides about the others.
    """
    details = {"elapsed_s": elapsed_s, "champion": _plain(champion), "tried": _plain(tried)}
    # Half of the error is for "better", half for "worse".
    overall = contrast(tried.reward, champion.reward, least=rollout.rewards, error=rollout.error / 2)
    if overall is not None:
        interval, error = list(overall.interval), overall.error
        details["reward"] = {"difference": overall.difference, "interval": interval, "standard_error": error}
    faults = [*_guards(rollout, champion, tried)]
    if overall is not None and overall.lower:
        faults.append(_sentence("it earns less", overall, tried.reward, champion.reward))
    if faults:
        return RolloutDecision("roll_back", "; ".join(faults), details)
    ended = elapsed_s >= rollout.window
    if rollout.mode == "shadow":  # users do not reward what they do not see
        if not ended:
            return RolloutDecision("wait", "no guard has been broken; the window has not ended", details)
        if max(tried.failures.of, tried.length.replies) < LEAST_REPLIES:
            few = f"the window has ended with fewer than {LEAST_REPLIES} replies"
            return RolloutDecision(rollout.undecided, few, details)
        return RolloutDecision("promote", "the window has ended, and no guard was broken", details)
    if overall is None or not overall.higher:
        why = _why_not(rollout, overall, champion, tried)
        if ended:
            return RolloutDecision(rollout.undecided, f"the window has ended: {why}", details)
        return RolloutDecision("wait", why, details)
    return RolloutDecision("promote", _sentence("it earns more", overall, tried.reward, champion.reward), details)


def _guards(rollout: RolloutSettings, champion: Figures, tried: Figures) -> Iterator[str]:
    """What must not be, whatever the rewards."""
    error = rollout.error
    yield from _higher_share("failed requests", tried.failures, champion.failures, rollout.failures, error)
    yield from _higher_share("refusals", tried.refusals, champion.refusals, rollout.refusals, error)
    yield from _higher_mean("seconds per token", tried.latency, champion.latency, rollout.latency, error)
    yield from _higher_mean("tokens per reply", tried.length, champion.length, rollout.reply_length, error)
    if _larger(champion.length, tried.length, rollout.reply_length, error):
        yield (
            f"its replies are shorter by more than {rollout.reply_length:.4g} times: "
            f"{tried.length.mean:.4g} tokens against {champion.length.mean:.4g}"
        )


def _higher_share(what: str, mine: Share, other: Share, margin: float, error: float) -> Iterator[str]:
    if other.of < LEAST_REPLIES:
        return
    if exceeds(mine, largest_allowed(other, margin, error=error), error=error):
        counts = f"{mine.found} of {mine.of} against {other.found} of {other.of}"
        yield f"more {what}: {counts}, a share higher by {margin:.4g} is allowed"


def _higher_mean(
    what: str, mine: SampleStatistics, other: SampleStatistics, times: float | None, error: float
) -> Iterator[str]:
    if times is not None and _larger(mine, other, times, error):
        yield f"more {what}: {mine.mean:.4g} against {other.mean:.4g}, {times:.4g} times as many are allowed"


def _larger(one: SampleStatistics, other: SampleStatistics, times: float, error: float) -> bool:
    outcome = contrast(one, scale(other, times), least=LEAST_REPLIES, error=error)
    return outcome is not None and outcome.higher


def _why_not(rollout: RolloutSettings, overall: Contrast | None, champion: Figures, tried: Figures) -> str:
    if overall is not None:
        return _sentence("it earns neither more nor less", overall, tried.reward, champion.reward)
    for whose, sample in (("it", tried.reward), ("the champion", champion.reward)):
        if sample.replies < rollout.rewards:
            return f"{whose} has only {sample.replies} of {rollout.rewards} rewarded replies"
    return f"the rewarded replies of one of the two are to fewer than {LEAST_UNITS} users or tasks"


def _sentence(what: str, outcome: Contrast, mine: SampleStatistics, other: SampleStatistics) -> str:
    low, high = outcome.interval
    return (
        f"{what}: {mine.mean:.4g} in {mine.replies} replies against {other.mean:.4g} in {other.replies}, "
        f"the difference lies between {low:.4g} and {high:.4g}"
    )


def _plain(figures: Figures) -> dict[str, Any]:
    """The figures as JSON has them; None for what is no number."""
    return {
        name: {part: number if math.isfinite(number) else None for part, number in value._asdict().items()}
        for name, value in figures._asdict().items()
    }
