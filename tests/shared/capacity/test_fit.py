"""What is chosen for a GPU's memory: it fits by the reckoning, and `tuneloop plan` prints the same."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.setup.test_setup import model_folder
from tuneloop.cli.capacity_plan import make_plan
from tuneloop.shared.capacity.memory import fit_trainer, reckon, shapes_of
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings

GB = 10**9
EIGHT_BITS = {"optimizer": {"bits": 8}}


def settings_of(folder: Path, **sections: Any) -> Settings:
    tree = {"checkpoint_root_dir": folder.parent, "model": {"model_path": folder}, "cluster": {"gpu_per_node": 1}}
    return Settings.model_validate(tree | {"mode": "train"} | sections)


@pytest.mark.parametrize(
    ("gb", "algorithm", "expected"),
    [
        (80, {}, (32768, False)),
        (48, {}, (8192, False)),
        (24, EIGHT_BITS, (8192, True)),
        (21, EIGHT_BITS, (1024, True)),
        (24, {"algorithm_type": "reinforce"}, (32768, True)),
    ],
)
def test_what_is_chosen_for_the_06b_shape_fits(
    tmp_path: Path, gb: int, algorithm: dict[str, Any], expected: tuple[int, bool]
) -> None:
    settings = settings_of(model_folder(tmp_path / "m"), algorithm=algorithm)
    shapes = shapes_of(settings)
    chosen, _, fits, _ = fit_trainer(settings, shapes, gb * GB)
    assert fits
    assert (chosen.trainer.micro_batch_tokens, bool(chosen.trainer.activation_checkpointing)) == expected
    assert reckon(chosen, shapes).total <= 0.95 * gb * GB
    more = {"micro_batch_tokens": 2 * expected[0]}
    larger = chosen.model_copy(update={"trainer": chosen.trainer.model_copy(update=more)})
    assert expected[0] == 32768 or reckon(larger, shapes).total > 0.95 * gb * GB
    plan = make_plan(settings, gpu_bytes=gb * GB, speed=1e9, free=64 * GB)
    assert plan.trainer == reckon(chosen, shapes)
    assert [each for each in plan.problems if "GPU" in each] == []


def test_what_is_set_is_not_chosen(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    set_ = settings_of(folder, trainer={"micro_batch_tokens": 65536})
    chosen, _, fits, _ = fit_trainer(set_, shapes_of(set_), 24 * GB)
    assert fits
    assert (chosen.trainer.micro_batch_tokens, chosen.trainer.activation_checkpointing) == (65536, None)
    never = settings_of(folder, trainer={"activation_checkpointing": False}, algorithm={"algorithm_type": "sft"})
    always = settings_of(folder, trainer={"activation_checkpointing": True}, algorithm={"algorithm_type": "sft"})
    for settings, again in ((never, False), (always, True)):
        found, _, fits, _ = fit_trainer(settings, shapes_of(settings), 48 * GB)
        assert fits
        assert found.trainer.activation_checkpointing is again


@pytest.mark.parametrize(("gb", "sharded"), [(80, False), (40, True), (16, True)])
def test_workers_have_the_whole_each_where_shares_are_not_better(tmp_path: Path, gb: int, sharded: bool) -> None:
    two = {"trainer": {"workers": 2}, "cluster": {"gpu_per_node": 2}}
    settings = settings_of(model_folder(tmp_path / "m"), algorithm=EIGHT_BITS, **two)
    fit = fit_trainer(settings, shapes_of(settings), gb * GB)
    assert (fit.fits, fit.sharded) == (True, sharded)
    assert fit.memory == reckon(fit.settings, shapes_of(settings), sharded=sharded)
    assert fit.memory.total <= 0.95 * gb * GB


def test_an_offloaded_optimizer_is_reckoned_as_main_memory(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    here, there = (settings_of(folder, trainer={"optimizer_offload": offload}) for offload in (False, True))
    assert not fit_trainer(here, shapes_of(here), 24 * GB).fits
    chosen, _, fits, _ = fit_trainer(there, shapes_of(there), 24 * GB)
    assert fits
    assert reckon(chosen, shapes_of(there)).optimizer == 0
    plan = make_plan(there, gpu_bytes=24 * GB, speed=1e9, free=64 * GB)
    assert plan.problems == []
    assert plan.main_memory["AdamW"] == int(sum(16 * each.weights for each in shapes_of(there)[:2]))
    [problem] = make_plan(there, gpu_bytes=24 * GB, speed=1e9, free=16 * GB).problems
    assert problem.startswith("model.model_path: main memory is too small: AdamW 19")


def test_a_teacher_on_this_machine_is_reckoned(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    teacher = model_folder(tmp_path / "teacher", 1_700_000_000)
    algorithm = {"algorithm_type": "distill", "distill": {"teacher_path": teacher}}
    settings = settings_of(folder, algorithm=algorithm)
    assert reckon(settings, shapes_of(settings)).teacher == 2 * 1_700_000_000
    plan = make_plan(settings, gpu_bytes=80 * GB, speed=1e9, free=64 * GB)
    assert plan.trainer is not None
    assert plan.trainer.teacher == 2 * 1_700_000_000
    unused = settings_of(folder, algorithm=algorithm | {"algorithm_type": "reinforce"})
    assert reckon(unused, shapes_of(unused)).teacher == 0
    gone = {"algorithm_type": "distill", "distill": {"teacher_path": tmp_path / "gone"}}
    shapes_of(settings_of(folder, algorithm=gone, mode="serve"))
    with pytest.raises(EnvironmentRefused, match=r"^algorithm\.distill\.teacher_path: .* is not there"):
        shapes_of(settings_of(folder, algorithm=gone))
