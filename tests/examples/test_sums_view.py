"""The demo's view: the same facts as a picture and as lines."""

from io import StringIO

import pytest
from rich.console import Console

from examples.sums.view import LineView, LiveView, Point, Progress, bins, chart, picture_of, recent_reward, view_on
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


def test_the_picture_shows_the_curve_and_the_numbers() -> None:
    text = rendered(picture_of(progress()))
    for shown in (
        "version served",
        "20",
        "21 of 60",
        "1.6 s",
        "2900",
        "trained",
        "1280",
        "leased",
        "█",
        "1.0 ┤",
        "0.0 └",
    ):
        assert shown in text
    assert "expired" not in text


def test_the_picture_is_drawn_before_anything_is_known() -> None:
    nothing = Progress(
        version=0, step=0, steps=60, curve=[], counts={}, feedback_to_served_s=None, requests=0, failed=0
    )
    assert "0 of 60" in rendered(picture_of(nothing))


@pytest.mark.parametrize("versions", [1, 7, 60, 61, 500])
def test_the_chart_keeps_its_size(versions: int) -> None:
    curve = [Point(version, 1.0, 64) for version in range(versions)]
    lines = chart(curve).plain.splitlines()
    assert len(lines) == 12
    assert max(map(len, lines)) <= 66
    assert lines[0].endswith("█" + " " * (60 - len(bins(curve, 60))))


def test_bars_are_as_high_as_the_reward() -> None:
    drawn = chart([Point(0, 0.0, 1), Point(1, 0.5, 1), Point(2, 1.0, 1)]).plain.splitlines()[:10]
    columns = ["".join(line[5 + bar] for line in drawn).count("█") for bar in range(3)]
    assert columns == [0, 5, 10]


def test_bins_are_weighted_by_replies() -> None:
    assert bins([Point(0, 1.0, 30), Point(1, 0.0, 10)], 1) == [0.75]


def test_the_recent_reward_forgets_what_is_old() -> None:
    assert recent_reward([]) is None
    assert recent_reward([Point(0, 0.0, 1000), Point(1, 0.5, 100), Point(2, 1.0, 100)]) == 0.75


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
