"""Shows what happens while it happens: a live picture on a terminal, plain lines anywhere else."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tuneloop.shared.experience import State

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ROWS, _MOST_COLUMNS = 10, 60
_LINE_EVERY_S = 5.0


class Point(NamedTuple):
    """What the replies of one version earned on average, and how many there were."""

    version: int
    reward: float
    replies: int


class Progress(NamedTuple):
    """The loop's progress."""

    version: int
    step: int
    steps: int
    curve: Sequence[Point]
    counts: Mapping[State, int]
    feedback_to_served_s: float | None
    requests: int
    failed: int


class View(Protocol):
    """An observer."""

    def phase(self, text: str, detail: str = "") -> None:
        """Say what is being done now; `detail` may change often."""

    def show(self, progress: Progress) -> None:
        """Show the loop's progress."""

    def __enter__(self) -> "View": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def view_on(console: Console) -> View:
    """The view that suits the console."""
    return LiveView(console) if console.is_terminal else LineView(console)


class LineView:
    """One plain line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._phase = ""
        self._next_line = 0.0

    def __enter__(self) -> "LineView":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def phase(self, text: str, detail: str = "") -> None:
        """Print the phase once."""
        if text != self._phase:
            self._phase = text
            self._print(text)

    def show(self, progress: Progress) -> None:
        """Print a line, unless the last one is fresh."""
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            self._print(line_of(progress))

    def _print(self, text: str) -> None:
        elapsed = time.monotonic() - self._started
        self._console.print(f"{elapsed:6.1f} s  {text}", highlight=False, soft_wrap=True)


class LiveView:
    """A picture that is always up to date."""

    def __init__(self, console: Console) -> None:
        self._started = time.monotonic()
        self._spinner = Spinner("dots")
        self._progress: Progress | None = None
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._picture)

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def phase(self, text: str, detail: str = "") -> None:
        """Put the phase beside the spinner."""
        self._spinner.update(text=Text.assemble(text, " ", (detail, "dim")))

    def show(self, progress: Progress) -> None:
        """Draw it at the next refresh."""
        self._progress = progress

    def _picture(self) -> RenderableType:
        elapsed = time.monotonic() - self._started
        below = Table.grid(expand=True)
        below.add_column()
        below.add_column(justify="right")
        below.add_row(self._spinner, Text(f"{elapsed:.0f} s", "dim"))
        return Group(picture_of(self._progress), below) if self._progress else below


def line_of(progress: Progress) -> str:
    """The progress in one line."""
    states = "  ".join(f"{state} {progress.counts.get(state, 0)}" for state in State if progress.counts.get(state, 0))
    latest = recent_reward(progress.curve)
    return (
        f"step {progress.step}/{progress.steps}  serving version {progress.version}  "
        f"reward {'  - ' if latest is None else format(latest, '.2f')}  {states}  "
        f"requests {progress.requests}  failed {progress.failed}"
    )


def picture_of(progress: Progress) -> RenderableType:
    """The progress as a picture: the reward by version, and the numbers beside it."""
    numbers = Table.grid(padding=(0, 1))
    numbers.add_column(style="dim")
    numbers.add_column(justify="right")
    latest, lag = recent_reward(progress.curve), progress.feedback_to_served_s
    for name, value in (
        ("version served", str(progress.version)),
        ("training steps", f"{progress.step} of {progress.steps}"),
        ("reward now", "-" if latest is None else f"{latest:.2f}"),
        ("feedback → served", "-" if lag is None else f"{lag:.1f} s"),
        ("requests", str(progress.requests)),
        ("failed", str(progress.failed)),
        *((str(state), str(progress.counts[state])) for state in State if progress.counts.get(state)),
    ):
        numbers.add_row(name, Text(value, "red bold" if name == "failed" and progress.failed else "bold"))
    both = Table.grid(padding=(0, 3))
    both.add_row(chart(progress.curve), numbers)
    return Panel(both, title="reward by version of the model", title_align="left", expand=False)


def recent_reward(curve: Sequence[Point], replies: int = 128) -> float | None:
    """The mean reward of about the last `replies` replies."""
    total, count = 0.0, 0
    for point in reversed(curve):
        total, count = total + point.reward * point.replies, count + point.replies
        if count >= replies:
            break
    return total / count if count else None


def chart(curve: Sequence[Point]) -> Text:
    """Bars from 0 to 1, one a version, or one for several when they are many."""
    bars = bins(curve, _MOST_COLUMNS)
    rows = []
    for row in reversed(range(_ROWS)):
        label = {_ROWS - 1: "1.0 ┤", _ROWS // 2 - 1: "0.5 ┤"}.get(row, "    │")
        cells = "".join(_EIGHTHS[min(8, max(0, round((bar * _ROWS - row) * 8)))] for bar in bars)
        rows.append(Text.assemble((label, "dim"), (cells.ljust(_MOST_COLUMNS), "green")))
    last = str(curve[-1].version) if curve else ""
    rows.append(Text(f"0.0 └{'─' * _MOST_COLUMNS}", "dim"))
    rows.append(Text(f"     0{last.rjust(max(len(last), len(bars) - 1))}", "dim"))
    return Text("\n").join(rows)


def bins(curve: Sequence[Point], most: int) -> list[float]:
    """The rewards of the curve in at most `most` bins of neighbouring versions, weighted by replies."""
    count = min(len(curve), most)
    bins = [curve[bar * len(curve) // count : (bar + 1) * len(curve) // count] for bar in range(count)]
    return [
        sum(point.reward * point.replies for point in each) / max(1, sum(point.replies for point in each))
        for each in bins
    ]
