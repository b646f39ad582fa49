"""The demo's view: the same facts as a picture and as lines."""

from io import StringIO

from rich.console import Console

from examples.sums.view import LineView, LiveView, Point, Progress, view_on
from tuneloop.shared.experience import State

RISING = [Point(version, version / 20, 64) for version in range(21)]


def progress(curve: list[Point] = RISING, *, failed: int = 0) -> Progress:
    return Progress(
        version=20,
        step=21,
        steps=60,
        curve=curve,
        counts={State.TRAINED: 1280, State.LEASED: 64, State.EXPIRED: 0},
        feedback_to_served_s=1.63,
        requests=2900,
        failed=failed,
    )


def rendered(what: object) -> str:
    console = Console(file=StringIO(), record=True, width=120)
    console.print(what)
    return console.export_text()


def test_a_pipe_gets_lines_and_a_terminal_a_picture() -> None:
    assert isinstance(view_on(Console(file=StringIO(), force_terminal=True)), LiveView)
    file = StringIO()
    with view_on(Console(file=file)) as view:
        assert isinstance(view, LineView)
        view.phase("warming up", "step 1")
        view.phase("warming up", "step 2")
        view.show(progress())
        view.show(progress())
    lines = file.getvalue().splitlines()
    assert [line.split("s  ", 1)[1] for line in lines[:1]] == ["warming up"]
    assert "step 21/60  serving version 20  reward 0.97  leased 64  trained 1280  requests 2900  failed 0" in lines[1]
    assert len(lines) == 2


def test_the_live_view_runs() -> None:
    file = StringIO()
    with LiveView(Console(file=file, force_terminal=True, width=120)) as view:
        view.phase("driving", "now")
        view.show(progress(failed=2))
    assert "reward by version" in file.getvalue()
