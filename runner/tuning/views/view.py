"""What happens, said in plain lines; and which views there are at once."""

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TextIO

from tuneloop.runner.tuning.journal import RunResult
from tuneloop.runner.tuning.summary import EvaluationReport, StepReport


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
    from tuneloop.runner.tuning.views.live_view import LiveView
    from tuneloop.runner.tuning.views.runner_curves import RunnerCurves

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
