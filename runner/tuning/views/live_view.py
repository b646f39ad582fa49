"""A view that stays in its place on a terminal: the present step, the last ones, and failures."""

import time
from collections import Counter, deque
from types import TracebackType
from typing import Any, Self

from tuneloop.runner.tuning.journal import RunResult
from tuneloop.runner.tuning.summary import EvaluationReport, Interval, StepReport, interval_of

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

        table = Table(title=f"step {self._step} of {self._steps}", caption=self._caption())
        for name in ("step", "reward [95 %]", "version", "runs", "failed", "tokens/s"):
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        now = interval_of(self._rewards) if self._rewards else None
        speed = self._tokens / max(time.monotonic() - self._since, 1e-9)
        table.add_row("now", _cell(now), "", f"{self._runs}", f"{self._runs - len(self._rewards)}", f"{speed:.0f}")
        return table

    def _caption(self) -> str:
        return ", ".join(f"{count} x {kind}" for kind, count in self._failed.most_common())


def _cell(reward: Interval | None) -> str:
    return "" if reward is None else f"{reward.mean:.3f} [{reward.low:.3f}, {reward.high:.3f}]"
