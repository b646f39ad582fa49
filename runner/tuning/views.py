"""Shows the progress of tune(): intervals, log lines, curves, and the result."""

import importlib.util
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Protocol, Self

from tuneloop.runner.collection.figures import mean_of
from tuneloop.runner.tuning.experiment import RunResult


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of `count` rewards with its 95 % confidence interval, unbounded for one reward."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}], n = {self.count}"


def interval_of(rewards: Sequence[float]) -> Interval:
    """Student's interval; Wilson's if all rewards are 0 or 1. Raises ValueError for no rewards."""
    if not rewards:
        raise ValueError("there is no reward to average")
    count, mean = len(rewards), fmean(rewards)
    found = mean_of(rewards, shares=all(reward in (0.0, 1.0) for reward in rewards))
    if found is None or found.low is None or found.high is None:
        return Interval(mean, -math.inf, math.inf, count)
    return Interval(mean, found.low, found.high, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A step: reward of its rollouts, failed runs, duration, and the version after it."""

    step: int
    reward: Interval | None
    runs: int
    failed: int
    seconds: float
    version: int
    published: bool
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """A version's reward on the evaluation tasks; `step` 0 precedes training."""

    step: int
    version: int
    reward: Interval | None
    failed: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TuneResult:
    """The result of tune(). `before` and `after` come from evaluations, otherwise from the first and last step."""

    folder: Path
    tensorboard: Path
    checkpoints: Path | None
    steps: int = 0
    version: int = 0
    before: Interval | None = None
    after: Interval | None = None
    evaluations: list[EvaluationReport] = field(default_factory=list)
    history: list[StepReport] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)


class RunnerCurves:
    """A view that also writes `rollout/…` and `evaluation/…` curves."""

    def __init__(self, view: "View", folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(logdir=str(folder))
        self.say, self.run_ended, self._view = view.say, view.run_ended, view

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def step(self, report: StepReport) -> None:
        self._view.step(report)
        self._add_reward("rollout", report.reward, report.step)
        self._add("rollout/failed", report.failed / max(report.runs, 1), report.step)
        self._add("rollout/seconds", report.seconds, report.step)
        self._add("rollout/version", report.version, report.step)
        self._add("rollout/tokens_per_second", report.tokens / max(report.seconds, 1e-9), report.step)
        self._writer.flush()

    def evaluation(self, report: EvaluationReport, *, seconds: float) -> None:
        self._view.evaluation(report, seconds=seconds)
        self._add_reward("evaluation", report.reward, report.step)
        self._add("evaluation/failed", report.failed, report.step)
        for name, value in report.metrics.items():
            self._add(f"evaluation/metrics/{name}", value, report.step)
        self._writer.flush()

    def _add_reward(self, of: str, reward: Interval | None, step: int) -> None:
        if reward is None:
            return
        for name, value in (("mean", reward.mean), ("low", reward.low), ("high", reward.high)):
            if math.isfinite(value):
                self._add(f"{of}/reward_{name}", value, step)

    def _add(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)


class View(Protocol):
    """Receives the progress of tune()."""

    def say(self, sentence: str) -> None:
        """Show a sentence."""

    def run_ended(self, result: RunResult) -> None:
        """A run has ended."""

    def step(self, report: StepReport) -> None:
        """A step is over."""

    def evaluation(self, report: EvaluationReport, *, seconds: float) -> None:
        """An evaluation is over."""


class PlainView:
    """Prints one line per event."""

    def say(self, sentence: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {sentence}", flush=True)  # noqa: T201

    def run_ended(self, result: RunResult) -> None:
        """Print nothing: a step has one line."""

    def step(self, report: StepReport) -> None:
        failed = f", {report.failed} failed" if report.failed else ""
        speed = report.tokens / max(report.seconds, 1e-9)
        self.say(
            f"step {report.step}: reward {report.reward or 'unknown'}; {report.runs} runs{failed}, "
            f"{report.seconds:.1f} s, {speed:.0f} tokens/s, version {report.version}"
        )

    def evaluation(self, report: EvaluationReport, *, seconds: float) -> None:
        failed = f", {report.failed} failed" if report.failed else ""
        metrics = "".join(f", {name} {value:.3f}" for name, value in report.metrics.items())
        self.say(
            f"evaluation at step {report.step}, version {report.version}: reward {report.reward or 'unknown'}"
            f"{metrics}{failed}, {seconds:.1f} s"
        )


@contextmanager
def open_view(chosen: View | None, tensorboard: Path) -> Iterator[View]:
    """The chosen view or PlainView, with curves if tensorboardX is installed."""
    view = PlainView() if chosen is None else chosen
    if importlib.util.find_spec("tensorboardX"):
        with RunnerCurves(view, tensorboard / "runner") as curves:
            yield curves
    else:
        view.say('no curves of runs are written: install tensorboardX by pip install "./runner[tune]"')
        yield view
