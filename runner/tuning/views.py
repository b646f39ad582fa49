"""What tune() shows: means with intervals, lines, a live view, curves, and its result."""

import importlib.util
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from tuneloop.runner.collection.figures import mean_of, share_of
from tuneloop.runner.tuning.experiment import RunResult


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of `count` rewards, and a 95 % confidence interval of it; one of a single reward is unbounded."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}], n = {self.count}"


def interval_of(rewards: Sequence[float]) -> Interval:
    """Student's interval; Wilson's where all rewards are 0 or 1. Raises ValueError for no rewards."""
    if not rewards:
        raise ValueError("there is no reward to average")
    count, mean = len(rewards), fmean(rewards)
    is_share = all(reward in (0.0, 1.0) for reward in rewards)
    found = share_of(rewards.count(1.0), count) if is_share else mean_of(rewards)
    if found is None or found.low is None or found.high is None:
        return Interval(mean, -math.inf, math.inf, count)
    return Interval(mean, found.low, found.high, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A step: its rollouts' reward, how many runs failed, how long it took, and the version after it."""

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
    """How a version did on the evaluation's tasks; `step` 0 is before training."""

    step: int
    version: int
    reward: Interval | None
    failed: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TuneResult:
    """What came of `tune()`. `before` and `after` are of the evaluation; without one, of the first and last step."""

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


#: So many of the last steps are shown.
_ROWS = 8


class LiveView:
    """Draws with `rich`; sentences are printed above what is drawn."""

    def __init__(self, steps: int, *, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._steps, self._console = steps, console or Console()
        self._rows: deque[tuple[str, ...]] = deque(maxlen=_ROWS)
        self._rewards: list[float] = []
        self._failed: Counter[str] = Counter()
        self._step = self._tokens = self._runs = 0
        self._since = time.monotonic()
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._draw)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, sentence: str) -> None:
        """Print a sentence above the table."""
        self._console.print(f"[{time.strftime('%H:%M:%S')}] {sentence}", markup=False, highlight=False)

    def run_ended(self, result: RunResult) -> None:
        """Count a run into the present step."""
        self._runs += 1
        self._tokens += result.tokens
        if result.reward is not None:
            self._rewards.append(result.reward)
        elif result.failure is not None:
            self._failed[result.failure] += 1

    def step(self, report: StepReport) -> None:
        """Make the present step one of the last ones."""
        speed = f"{report.tokens / max(report.seconds, 1e-9):.0f}"
        self._rows.append(
            (f"{report.step}", _cell(report.reward), f"v{report.version}", f"{report.runs}", f"{report.failed}", speed)
        )
        self._step, self._rewards = report.step, []
        self._runs = self._tokens = 0
        self._since = time.monotonic()

    def evaluation(self, report: EvaluationReport, *, seconds: float) -> None:
        """Add an evaluation between the steps."""
        row = (f"eval {report.step}", _cell(report.reward), f"v{report.version}", "", f"{report.failed}", "")
        self._rows.append(row)
        self._since = time.monotonic()

    def _draw(self) -> Any:
        from rich.table import Table

        table = Table(
            title=f"step {self._step} of {self._steps}",
            caption=", ".join(f"{count} x {kind}" for kind, count in self._failed.most_common()),
        )
        for name in ("step", "reward [95 %]", "version", "runs", "failed", "tokens/s"):
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        now = interval_of(self._rewards) if self._rewards else None
        speed = self._tokens / max(time.monotonic() - self._since, 1e-9)
        table.add_row("now", _cell(now), "", f"{self._runs}", f"{self._runs - len(self._rewards)}", f"{speed:.0f}")
        return table


def _cell(reward: Interval | None) -> str:
    return "" if reward is None else f"{reward.mean:.3f} [{reward.low:.3f}, {reward.high:.3f}]"


class RunnerCurves:
    """Writes `rollout/…` and `evaluation/…` curves; the step is that of tune()."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(logdir=str(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def say(self, sentence: str) -> None:
        """Sentences are no curves."""

    def run_ended(self, result: RunResult) -> None:
        """A run alone is no point of a curve."""

    def step(self, report: StepReport) -> None:
        """Add a step's points."""
        self._add_reward("rollout", report.reward, report.step)
        self._add("rollout/failed", report.failed / max(report.runs, 1), report.step)
        self._add("rollout/seconds", report.seconds, report.step)
        self._add("rollout/version", report.version, report.step)
        self._add("rollout/tokens_per_second", report.tokens / max(report.seconds, 1e-9), report.step)
        self._writer.flush()

    def evaluation(self, report: EvaluationReport, *, seconds: float) -> None:
        """Add an evaluation's points."""
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
    """What the loop tells."""

    def say(self, sentence: str) -> None:
        """Show a sentence."""

    def run_ended(self, result: RunResult) -> None:
        """A run has ended."""

    def step(self, report: StepReport) -> None:
        """A step is over."""

    def evaluation(self, report: EvaluationReport, *, seconds: float) -> None:
        """An evaluation is over."""


class PlainView:
    """One line for each thing that happened."""

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        print(f"[{time.strftime('%H:%M:%S')}] {sentence}", file=self._output or sys.stdout, flush=True)

    def run_ended(self, result: RunResult) -> None:
        """Say nothing: a step is one line."""

    def step(self, report: StepReport) -> None:
        """Print a step's line."""
        failed = f", {report.failed} failed" if report.failed else ""
        speed = report.tokens / max(report.seconds, 1e-9)
        self.say(
            f"step {report.step}: reward {report.reward or 'unknown'}; {report.runs} runs{failed}, "
            f"{report.seconds:.1f} s, {speed:.0f} tokens/s, version {report.version}"
        )

    def evaluation(self, report: EvaluationReport, *, seconds: float) -> None:
        """Print an evaluation's line."""
        failed = f", {report.failed} failed" if report.failed else ""
        metrics = "".join(f", {name} {value:.3f}" for name, value in report.metrics.items())
        self.say(
            f"evaluation at step {report.step}, version {report.version}: reward {report.reward or 'unknown'}"
            f"{metrics}{failed}, {seconds:.1f} s"
        )


class ManyViews:
    """Tells several views the same."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views

    def say(self, sentence: str) -> None:
        """Pass it on."""
        for view in self._views:
            view.say(sentence)

    def run_ended(self, result: RunResult) -> None:
        """Pass it on."""
        for view in self._views:
            view.run_ended(result)

    def step(self, report: StepReport) -> None:
        """Pass it on."""
        for view in self._views:
            view.step(report)

    def evaluation(self, report: EvaluationReport, *, seconds: float) -> None:
        """Pass it on."""
        for view in self._views:
            view.evaluation(report, seconds=seconds)


@contextmanager
def open_view(chosen: View | None, tensorboard: Path, *, steps: int) -> Iterator[View]:
    """The chosen view, else a live one on a terminal, else lines; and curves, if there is a package to write them."""
    from tuneloop.runner.tuning.views import LiveView, RunnerCurves

    with ExitStack() as stack:
        view = chosen
        if view is None and sys.stdout.isatty() and importlib.util.find_spec("rich"):
            view = stack.enter_context(LiveView(steps))
        views = [PlainView() if view is None else view]
        if importlib.util.find_spec("tensorboardX"):
            views.append(stack.enter_context(RunnerCurves(tensorboard / "runner")))
        else:
            views[0].say('no curves are written: pip install "./runner[tune]" has what writes them')
        yield ManyViews(views)
