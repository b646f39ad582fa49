"""The runner's own curves, for TensorBoard: run `runner`, beside the service's `trainer` and `explorer`."""

import math
from pathlib import Path
from types import TracebackType
from typing import Self

from tuneloop.runner.tuning.journal import RunResult
from tuneloop.runner.tuning.summary import EvaluationReport, Interval, StepReport


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
