"""Several ranks come to the numbers of one, and what fails on one of them fails on all."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.doubles.warm.process import TRAINING, WarmProcess
from tests.trainer.workers.rank import KEPT, outcome
from tuneloop.trainer.micro_batch import MicroBatch
from tuneloop.trainer.parallel import ALONE

PPO = {"algorithm": {"algorithm_type": "ppo"}}
GRPO = {"algorithm": {"algorithm_type": "grpo"}, "buffer": {"group_by": "task", "group_size": 2}}
DPO = {"algorithm": {"algorithm_type": "dpo"}, "buffer": {"group_by": "task", "group_size": 2}}
TWICE = ("kept", "again")
LORA = {"model": {"lora": {"rank": 2}}}
METHODS = {"ppo": PPO, "grpo": GRPO, "dpo": DPO}


def _run(settings, folder, size, scenarios, *, together=1):
    plan = {
        name: {"settings": settings(**sections).model_dump(mode="json"), **how}
        for name, (sections, how) in scenarios.items()
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-m", "tests.trainer.workers.rank", str(folder), str(size), str(together)]
    assert WarmProcess(command, modules=TRAINING).wait(400) == 0
    return json.loads((folder / "ends.json").read_text())


def _found(folder, name):
    return json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")


def _largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_several_ranks_come_to_the_numbers_of_one(settings, tmp_path, size):
    few = {"buffer": {"train_batch_size": 2}}
    scenarios = {name: (sections, {}) for name, sections in METHODS.items()}
    scenarios["idle"] = (PPO | few, {"rows": 2})  # with two mini-batches, all ranks but one have nothing to do
    scenarios["whole"] = (PPO, {"whole": True})
    scenarios["mean"] = (PPO, {"mean": True})
    few_at_once = {"trainer": {"micro_batch_tokens": KEPT}}
    scenarios["lora"] = (PPO | LORA, {})
    scenarios["memory"] = (PPO | LORA | {"trainer": {"micro_batch_tokens": 256}}, {"fail": "memory", "on": 1})
    scenarios["kept"] = (PPO | LORA | few_at_once, {"fail": "kept", "on": 1})
    scenarios["alone"] = (PPO | LORA | few_at_once, {"fail": "alone", "on": 1})
    scenarios["nan"] = (PPO, {"fail": "nan", "on": 1})
    ends = _run(settings, tmp_path, size, scenarios)
    assert [code for code, _ in ends] == [0] * size
    found = {name: _found(tmp_path, name) for name in scenarios}
    for name in (*METHODS, "idle", "lora", "whole"):
        metrics, weights, _ = outcome(settings(**scenarios[name][0]), ALONE, rows=2 if name == "idle" else 12)
        assert found[name][0] == pytest.approx(metrics, rel=1e-5, abs=1e-5), name
        assert _largest_difference(found[name][1], weights) < 1e-5, name
    metrics, _, _ = outcome(settings(**PPO), ALONE)
    assert found["mean"][0]["0 actor/grad_norm"] < 0.9 * metrics["0 actor/grad_norm"]
    metrics, weights, _ = outcome(settings(**PPO, **LORA), ALONE)
    _memory_that_runs_out_on_one_rank_makes_all_go_on_with_smaller_pieces(found["memory"], metrics, weights)
    _a_sequence_that_does_not_fit_on_one_rank_has_all_make_activations_again(found["kept"], weights)
    _a_sequence_that_never_fits_is_given_up_by_all(found["alone"])
    _what_is_not_finite_on_one_rank_is_refused_by_all(found["nan"])


@pytest.mark.parametrize("size", [2, 4])
def test_over_twenty_steps_losses_and_norms_stay_those_of_one(settings, tmp_path, size):
    sections = {"algorithm": {"algorithm_type": "ppo"}, "trainer": {"dtype": "float32"}}
    ends = _run(settings, tmp_path, size, {"long": (sections, {"steps": 20})})
    assert [code for code, _ in ends] == [0] * size
    told, _ = _found(tmp_path, "long")
    metrics, _, _ = outcome(settings(**sections), ALONE, steps=20)
    compared = [name for name in metrics if name.endswith(("grad_norm", "loss"))]
    assert len(compared) >= 3 * 20
    assert {name: told[name] for name in compared} == pytest.approx(
        {name: metrics[name] for name in compared}, rel=1e-5
    )


def _memory_that_runs_out_on_one_rank_makes_all_go_on_with_smaller_pieces(found, metrics, weights):
    assert (found[0].pop("micro_batch_tokens"), found[0].pop("spoilt")) == (128, False)
    assert found[0] == pytest.approx({name: each for name, each in metrics.items() if name in found[0]}, abs=1e-5)
    assert _largest_difference(found[1], weights) < 1e-5


def _a_sequence_that_does_not_fit_on_one_rank_has_all_make_activations_again(found, weights):
    """One that keeps its own would have no room again, and nothing smaller than one sequence fits."""
    assert (found[0]["micro_batch_tokens"], found[0]["checkpointing"]) == (KEPT, True)
    assert _largest_difference(found[1], weights) < 1e-5


def _a_sequence_that_never_fits_is_given_up_by_all(found):
    assert len([name for name in found[0] if name.startswith("refused in step")]) == 2
    assert (found[0]["micro_batch_tokens"], found[0]["spoilt"]) == (KEPT, False)


def _what_is_not_finite_on_one_rank_is_refused_by_all(found):
    assert [name for name in found[0] if name.startswith("not finite")] == [
        "not finite in step 1: the actor's gradient norm"
    ]
    assert all(bool(torch.isfinite(each).all()) for each in found[1].values())
    assert not found[0]["spoilt"]


def test_memory_that_runs_out_on_a_rank_that_shares_weights_has_all_start_again_with_less(settings, tmp_path):
    """The others wait for the weights that it would send."""
    sections = PPO | {"trainer": {"micro_batch_tokens": 256, "activation_checkpointing": False}}
    settings(**sections).job_dir.mkdir(parents=True)
    (one, _), (other, _) = _run(settings, tmp_path, 2, {"memory": (sections, {"fail": "memory", "on": 1})})
    assert one != 0 != other
    assert not (tmp_path / "memory.json").exists()
    assert MicroBatch(settings(**sections)).tokens == 128


def test_two_adapters_on_one_base_learn_the_same_with_activations_made_again(settings, base, tmp_path):
    model = {"model_path": base, "lora": {"rank": 2}}
    made = {name: PPO | {"model": model, "trainer": {"activation_checkpointing": name == "again"}} for name in TWICE}
    ends = _run(settings, tmp_path, 2, {name: (sections, {}) for name, sections in made.items()})
    assert [code for code, _ in ends] == [0, 0]
    (kept, weights), (again, others) = (_found(tmp_path, name) for name in TWICE)
    assert (kept.pop("checkpointing"), again.pop("checkpointing")) == (False, True)
    assert again == kept
    assert _largest_difference(weights, others) == 0
    _, alone, _ = outcome(settings(**made["again"]), ALONE)
    assert _largest_difference(weights, alone) < 1e-5


@pytest.mark.parametrize(("how", "code"), [("death", -9), ("hang", 1)])
def test_a_rank_that_dies_or_hangs_in_mid_step_ends_the_others(settings, tmp_path, how, code):
    scenarios = {how: (PPO, {"fail": how, "on": 1, "slow": how == "hang"})}
    (one, at_one), (other, at_other) = _run(settings, tmp_path, 2, scenarios)
    assert (one, other) == (1, code)
    assert abs(at_one - at_other) < 30
    assert (how == "hang") <= (at_one < at_other)
    assert not (tmp_path / f"{how}.json").exists()


def test_the_others_wait_as_long_as_it_takes_for_what_rank_0_alone_waits_for(settings, tmp_path):
    distill = {"teacher_url": "http://localhost:1", "teacher_model": "big"}
    scenarios = {
        "teacher": ({"algorithm": {"algorithm_type": "distill", "distill": distill}}, {"slow": True}),
        "traffic": ({"trainer": {"yield_to_traffic": True}}, {"slow": True}),
    }
    ends = _run(settings, tmp_path, 2, scenarios)
    assert [code for code, _ in ends] == [0, 0]
    busy, weights = _found(tmp_path, "traffic")
    metrics, expected, _ = outcome(settings(), ALONE)
    assert busy == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    assert _largest_difference(weights, expected) < 1e-5
