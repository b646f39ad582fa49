"""Ends what was begun: decides, as long as a version is being tried, whether it is promoted, rolled back or tried on.

Of several explorers one decides, by the rewards, lengths and refusals of the ledger, and by the failed requests that
all of them have counted there.

The tests may be looked at after every reply: how often one looks does not make an error more probable.

Means: the score of a difference, as it runs on, is a Brownian motion B in time t, the information gathered. Robbins and
Siegmund (Boundary crossing probabilities for the Wiener process and sample sums, Annals of Mathematical Statistics 41,
1970) mix its drifts evenly over one side, and find for a > 0 that

    P(B(t) / sqrt(t) >= sqrt(a^2 + log(t / m)) for any t >= m)  <=  1 - F(a) + f(a) (a + f(a) / F(a)),

F and f being the normal distribution and its density. That it holds for means of anything with a variance that is
estimated, from `m` replies on, is shown by Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (Time-uniform central limit
theory and asymptotic confidence sequences, Annals of Statistics 52, 2024, arXiv 2103.06476).

Shares: the chances of what was seen, mixed evenly over all shares above the one allowed, as a multiple of its chance at
that one, is a martingale there; by Ville's inequality it ever reaches 1 / error with the probability `error` at most.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.engines.fleet import Engine, EngineState, TrafficSplit
from tuneloop.explorer.metrics import Metrics, ProcessTotals
from tuneloop.shared.errors import LedgerError, LedgerUnavailable
from tuneloop.shared.evaluation.samples import Figures, SampleStatistics, Share
from tuneloop.shared.experience import VersionAction, VersionState, steady_clock
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.versions.versions import Versions
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import SHARES, RolloutSettings

log = structlog.get_logger()


class CanaryTrial(NamedTuple):
    version: Version
    mode: str
    share: float
    began: float

    @property
    def split(self) -> TrafficSplit:
        return TrafficSplit(self.version.version, share=self.share)


def current_trial(versions: Versions, rollout: RolloutSettings) -> CanaryTrial | None:
    """The trial of a policy that is under way, on the terms that it was begun with, if there is one."""
    canary = versions.canary()
    if canary is None:
        return None
    begun = [each for each in versions.events(canary.version) if each.action is VersionAction.CANARY][-1]
    mode, share = begun.details.get("mode", rollout.mode), begun.details.get("share", rollout.tried_share)
    return CanaryTrial(canary, mode if mode in SHARES else "canary", share, begun.at)


#: How long to wait from one look to the next, at most.
_LOOK_S = 5.0

#: How long what was counted of a trial is kept after the last time, in seconds.
_KEPT_S = 7 * 86400.0

_REPLIES = "tuneloop_replies"


class CanaryController:
    """The trial that is under way in the default policy, or in another's line, if there is one."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        *,
        totals: ProcessTotals,
        metrics: Metrics,
        line: Versions | None = None,
    ) -> None:
        self._rollout = settings.rollout
        self._interval_s = min(settings.explorer.service_status_check_interval, _LOOK_S)
        self._refusals = settings.monitor.drift.refusals_found
        self._ledger, self._line = ledger, line or ledger.versions
        self._totals = totals
        self._metrics = metrics
        self._name = settings.explorer_name
        self._began: float | None = None
        self._before: Mapping[str, Share] = {}

    async def run(self) -> None:
        async def look() -> None:
            try:
                await self.turn()
            except LedgerUnavailable:
                raise
            except LedgerError as error:  # another decision was made meanwhile
                log.warning("rollout_not_decided", reason=str(error))

        await every(self._interval_s, look, task="canary", metrics=self._metrics)

    async def turn(self) -> None:
        trial = await asyncio.to_thread(current_trial, self._line, self._rollout)
        began = trial.began if trial else None
        if began != self._began:
            self._began, self._before = began, request_counts(self._totals)
        if trial is None:
            return
        champion = await asyncio.to_thread(self._line.champion)
        versions = champion.version, trial.version.version
        await self._count(trial.began, versions)
        lead = await asyncio.to_thread(self._ledger.explorers.lead, self._name)
        if lead is None:
            return
        rollout = self._rollout.model_copy(update={"mode": trial.mode, "share": trial.share})
        figures = []
        for number in versions:
            of = self._ledger.comparisons.figures
            found = await asyncio.to_thread(of, number, trial.began, refusals=self._refusals)
            counted = await asyncio.to_thread(self._ledger.explorers.counts, _scope(trial.began, number))
            figures.append(found._replace(failures=Share(*(int(counted.get(each, 0)) for each in ("failed", "asked")))))
        champions, tried = figures
        decision = decide(rollout, champions, tried, elapsed_s=steady_clock() - trial.began)
        why: dict[str, Any] = {"by": "explorer", "reason": decision.reason, "details": decision.details, "lead": lead}
        if decision.action == "roll_back":
            roll_back = partial(self._line.roll_back, only_as=VersionState.CANARY)
            await asyncio.to_thread(roll_back, trial.version.version, **why)
        elif decision.action == "promote" and not await asyncio.to_thread(
            self._ledger.alarms.promotion_held, trial.version.policy
        ):
            await asyncio.to_thread(self._line.promote, trial.version.version, **why)

    async def _count(self, began: float, versions: tuple[int, int]) -> None:
        failures = request_counts(self._totals)
        for number in versions:
            now, then = (counts.get(str(number), Share()) for counts in (failures, self._before))
            # Of more versions than have series of their own, counts begin again.
            counted = {"asked": max(0, now.of - then.of), "failed": max(0, now.found - then.found)}
            if any(counted.values()):
                until = steady_clock() + _KEPT_S
                await asyncio.to_thread(self._ledger.explorers.add, _scope(began, number), counted, until=until)
            self._before = {**self._before, str(number): now}


def _scope(began: float, version: int) -> str:
    return f"version {version} since {began!r}"


def request_counts(totals: ProcessTotals) -> dict[str, Share]:
    """How many requests each version's engines were asked, and how many of them failed there, in all processes."""
    whole: dict[str, int] = {}
    failed: dict[str, int] = {}
    for family in totals.collect():
        for sample in family.samples if family.name == _REPLIES else ():
            if sample.name == f"{_REPLIES}_total":
                version, outcome = sample.labels["version"], sample.labels["outcome"]
                into = {"failed": failed, "whole": whole}.get(outcome)
                if into is not None:  # what an engine refuses is the request's own fault
                    into[version] = into.get(version, 0) + int(sample.value)
    return {each: Share(failed.get(each, 0), failed.get(each, 0) + whole.get(each, 0)) for each in whole | failed}


def to_try_on(engines: Sequence[Engine], version: int, share: float) -> list[Engine]:
    """The engines that get a tried version: about its share of those up, at least one, one less than all."""
    up = _up(engines)
    count = min(max(1, round(share * len(up))), len(up) - 1)
    by_preference = sorted(up, key=lambda engine: (engine.version != version, -engine.number))
    return by_preference[: max(count, 0)]


def division(
    engines: Sequence[Engine], now: TrafficSplit | None, champion: int, trial: CanaryTrial | None
) -> TrafficSplit | None:
    """How the requests are to be divided, after `now`.

    Engines of a version that is tried no more, and did not become the champion, get nothing as long as they have it.
    """
    if now is None or now.version in {champion, trial and trial.version.version}:
        left = False
    else:
        left = any(each.version == now.version for each in _up(engines))
    if now is not None and left:
        return now.without_traffic()
    return trial.split if trial else None


def _up(engines: Sequence[Engine]) -> list[Engine]:
    up = {EngineState.READY, EngineState.RELOADING}
    return [engine for engine in engines if engine.state in up]


_Action = Literal["promote", "roll_back", "wait"]


class RolloutDecision(NamedTuple):
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
    if overall is None or not overall.higher:
        why = _why_not(rollout, overall, champion, tried)
        if ended:
            return RolloutDecision(rollout.undecided, f"the window has ended: {why}", details)
        return RolloutDecision("wait", why, details)
    return RolloutDecision("promote", _sentence("it earns more", overall, tried.reward, champion.reward), details)


def _guards(rollout: RolloutSettings, champion: Figures, tried: Figures) -> Iterator[str]:
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


def _why_not(rollout: RolloutSettings, overall: "Contrast | None", champion: Figures, tried: Figures) -> str:
    if overall is not None:
        return _sentence("it earns neither more nor less", overall, tried.reward, champion.reward)
    for whose, sample in (("it", tried.reward), ("the champion", champion.reward)):
        if sample.replies < rollout.rewards:
            return f"{whose} has only {sample.replies} of {rollout.rewards} rewarded replies"
    return f"the rewarded replies of one of the two are to fewer than {LEAST_UNITS} users or tasks"


def _sentence(what: str, outcome: "Contrast", mine: SampleStatistics, other: SampleStatistics) -> str:
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


#: A variance between fewer units is not known well enough.
LEAST_UNITS = 10

#: Fewer replies or requests than that say nothing of latency, length, failures and refusals.
LEAST_REPLIES = 20


class Contrast(NamedTuple):
    """How far the mean of one sample lies above another's: the difference in standard errors is tested with `bound`."""

    difference: float
    error: float
    bound: float

    @property
    def higher(self) -> bool:
        """Whether it is shown to be higher."""
        return self.difference > self.bound * self.error

    @property
    def lower(self) -> bool:
        """Whether it is shown to be lower."""
        return -self.difference > self.bound * self.error

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true difference lies, however often one looks, but for the error on either side."""
        return self.difference - self.bound * self.error, self.difference + self.bound * self.error


def contrast(one: SampleStatistics, other: SampleStatistics, *, least: int, error: float) -> Contrast | None:
    """How far `one` lies above `other`, with the probability `error` of a mistake on either side.

    None until both have `least` replies, and enough independent units.
    """
    if min(one.replies, other.replies) < least or min(one.units, other.units) < LEAST_UNITS:
        return None
    difference = one.mean - other.mean
    # The clock began at the latest when both had `least` replies; an earlier begin only widens the bound.
    elapsed = 2 * (one.replies / least) * (other.replies / (one.replies + other.replies))
    found = Contrast(difference, standard_error(one, other), math.sqrt(_level(error) ** 2 + math.log(elapsed)))
    return found if all(map(math.isfinite, found)) else None


def scale(sample: SampleStatistics, times: float) -> SampleStatistics:
    """The sample of values that are so many times as high."""
    return sample._replace(mean=times * sample.mean, variance=times**2 * sample.variance)


def largest_allowed(share: Share, margin: float, *, error: float) -> float:
    """The highest share that may be the true one, which is a limit to the other version's, too, and the margin."""
    from scipy import special  # takes a third of the time that the explorer's processes need for their imports

    found, of = share
    highest = float(special.betaincinv(found + 1, of - found, 1 - error)) if found < of else 1.0
    return min(1.0, highest + margin)


def exceeds(share: Share, limit: float, *, error: float) -> bool:
    """Whether the true share is shown to be above the limit."""
    from scipy import special

    found, of = share
    if of < LEAST_REPLIES or not 0 < limit < 1 or found <= limit * of:
        return False
    a, b = found + 1, of - found + 1
    mixed = special.betaln(a, b) + math.log(special.betaincc(a, b, limit)) - math.log1p(-limit)
    at_limit = found * math.log(limit) + (of - found) * math.log1p(-limit)
    return bool(mixed - at_limit >= -math.log(error))


def standard_error(one: SampleStatistics, other: SampleStatistics) -> float:
    """That of the difference: by the spread within each, or by that of all values taken as one, whichever is larger.

    The second is right where the two are the same, and says enough where few values happen to be all alike. Both need
    two units.
    """
    difference, total = one.mean - other.mean, one.units + other.units
    first, second = one.variance / one.replies, other.variance / other.replies
    within = first * one.units * (one.units - 1) + second * other.units * (other.units - 1)
    between = difference**2 * one.units * other.units / total
    together = (within + between) / (total - 1) * (1 / one.units + 1 / other.units)
    variance = first + second
    if variance > 0:
        # The degrees of freedom of the spread within both (Welch, Satterthwaite), and the variance with which a normal
        # score is as rare as Student's with so few of them.
        weight = first / variance
        freedom = 1 / (weight**2 / (one.units - 1) + (1 - weight) ** 2 / (other.units - 1))
        excess = difference**2 / variance / freedom
        variance *= excess / math.log1p(excess) if excess > 1e-9 else 1.0
    return math.sqrt(max(together, variance))


@cache
def _level(error: float) -> float:
    """The a of the inequality above, for the error on one side."""
    low, high = 0.0, 40.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        density = math.exp(-(middle**2) / 2) / math.sqrt(2 * math.pi)
        below = math.erfc(-middle / math.sqrt(2)) / 2
        crossing = math.erfc(middle / math.sqrt(2)) / 2 + density * (middle + density / below)
        low, high = (middle, high) if crossing > error else (low, middle)
    return high
