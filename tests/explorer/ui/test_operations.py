"""The trainer's page, and the doctor's."""

from pathlib import Path

from tests.explorer.running import RunningExplorer
from tests.explorer.ui.conftest import Filled
from tests.explorer.ui.test_pages import words
from tuneloop.explorer.ui.operations import FIRST, MOST, CurveReader, thin
from tuneloop.shared.tensorboard import Curves


def test_the_trainers_curves_and_steps_are_shown(filled: Filled):
    page = filled.text("/ui/trainer")
    assert page.count("data-chart=") == MOST == 6
    assert "critic/rewards/mean by step, " in page
    assert "What replies earned, step by step: it should rise." in words(page)
    assert page.index("critic/rewards/mean") < page.index("actor/entropy") < page.index("actor/pg_loss")
    assert "All 8 curves" in words(page)
    whole = filled.text("/ui/trainer", curves="all")
    assert (whole.count("data-chart="), "All 8 curves" in words(whole)) == (8, False)
    assert 'hx-get="/ui/trainer?curves=all"' in whole  # what is looked at stays when it is read again
    assert "6 6 32" in words(page)  # step, version, replies
    assert "trainer, epoch 6" in words(filled.text("/ui/trainer/status"))


def test_the_curves_that_come_first_are_those_that_the_trainer_writes():
    written = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert [name for names in FIRST for name in names if f"`{name}`" not in written] == []


def test_without_a_trainer_the_page_says_so(explorer: RunningExplorer):
    assert "No curve is on this machine yet" in words(explorer.http.get("/ui/trainer").text)
    assert "none has started" in words(explorer.http.get("/ui/trainer/status").text)


def test_the_doctor_says_whether_the_ledger_balances(filled: Filled):
    assert 'hx-get="/ui/doctor/report"' in filled.text("/ui/doctor")
    seen = words(filled.text("/ui/doctor/report"))
    assert "The ledger balances." in seen
    assert "344 experiences = " in seen


# The curves.


def test_curves_are_read_on_where_they_ended(tmp_path: Path):
    reader, curves = CurveReader(tmp_path), Curves(tmp_path)
    assert reader.read() == {}
    curves.add(1, {"loss": 0.5, "reward": 1.0})
    assert reader.read() == {"loss": [(1, 0.5)], "reward": [(1, 1.0)]}
    curves.add(2, {"loss": 0.25})
    assert reader.read()["loss"] == [(1, 0.5), (2, 0.25)]


def test_a_run_that_begins_again_replaces_its_later_points(tmp_path: Path):
    reader, curves = CurveReader(tmp_path), Curves(tmp_path)
    for step in range(1, 6):
        curves.add(step, {"loss": float(step)})
    assert len(reader.read()["loss"]) == 5
    Curves(tmp_path, after=3).add(4, {"loss": 40.0})
    assert reader.read()["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_half_a_record_waits_for_its_rest(tmp_path: Path):
    Curves(tmp_path).add(1, {"loss": 0.5})
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    reader = CurveReader(tmp_path)
    assert reader.read() == {}
    file.write_bytes(whole)
    assert reader.read() == {"loss": [(1, 0.5)]}


def test_a_long_curve_keeps_its_last_point_and_what_is_finite():
    curve = thin([(step, float("nan") if step == 5 else 1.0) for step in range(10_000)])
    assert len(curve) <= 400
    assert curve[-1][0] == 9_999
    assert 5 not in dict(curve)
