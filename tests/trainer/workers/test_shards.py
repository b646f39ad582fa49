"""Each rank has masters and moments of its shards alone; together they are, and are saved as, those of one rank."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.trainer.workers.rank import outcome
from tests.trainer.workers.test_ranks import PPO, _found, _run
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.models.eight_bit import decode_moment
from tuneloop.trainer.parallel import ALONE

BITS = {"algorithm_type": "ppo", "optimizer": {"lr": 1e-3, "bits": 8}, "critic_optimizer": {"lr": 1e-3}}
#: Every sequence is a micro-batch of its own; but a gradient is rounded to 16 bits once it is the sum of all ranks'.
ALONE_EACH = {"dtype": "bfloat16", "micro_batch_tokens": 1}
#: Of numbers rounded to fewer bits so many fall to the other side; blocks of 8 bits end elsewhere where parts do.
_ROUNDED = {"half": 0.08, "bits": 0.02, "lora-bits": 0.02}
FEW = 4
SCENARIOS = {
    "lora": PPO | {"model": {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}},
    "lora-bits": {"algorithm": BITS, "model": {"lora": {"rank": 2, "base_bits": 4}}},
    "half": PPO | {"trainer": ALONE_EACH | {"optimizer_offload": True}},
}


def _saved(folder):
    """What is kept of the optimisers, moments in float32."""
    found = {}
    for part in ("actor", "critic"):
        kept = load_file(folder / "trainer_state" / f"{part}.safetensors")
        for name, each in kept.items():
            moment, _, parameter = name.partition(".")
            if (scale := kept.get(f"{moment}_scale.{parameter}")) is not None:
                each = decode_moment({moment: each.view(-1), f"{moment}_scale": scale}, moment).view(each.shape)
            if not moment.endswith("_scale"):
                found[f"{part}.{name}"] = each
    return found


def _without_shares(metrics):
    """A share of few tokens jumps where a number is rounded."""
    return {name: each for name, each in metrics.items() if "clipfrac" not in name}


def _share_apart(one, other):
    """The share of numbers that differ by more than 1e-5."""
    assert one.keys() == other.keys()
    apart = [(each.float() - other[name].float()).abs() > 1e-5 for name, each in one.items()]
    return float(torch.cat([each.flatten() for each in apart]).float().mean())


@pytest.fixture(scope="session")
def wide(base, tmp_path_factory):
    """A base model whose rows are as long as a block: parts of matrices end where blocks do."""
    folder = tmp_path_factory.mktemp("wide")
    shutil.copytree(base, folder, dirs_exist_ok=True)
    config = Qwen3Config.from_pretrained(base, hidden_size=256, intermediate_size=256)
    torch.manual_seed(8)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_the_state_of_several_ranks_is_that_of_one_and_is_gone_on_with_by_any_number(settings, wide, tmp_path, size):
    scenarios = SCENARIOS | {"bits": {"algorithm": BITS, "model": {"model_path": str(wide)}}}
    alone, before = {}, tmp_path / "before"
    before.mkdir()
    for name, sections in scenarios.items():
        metrics, weights, learner = outcome(settings(**sections), ALONE, rows=FEW)
        (before / name).mkdir()
        snapshot.save(learner, before / name, base=settings(**sections).model.model_path)
        alone[name] = metrics, weights
    begun = {name: (sections, {"save": True, "rows": FEW}) for name, sections in scenarios.items()}
    resumed = {f"{name}-on": (each, {"from": str(before / name), "rows": FEW}) for name, each in scenarios.items()}
    assert [code for code, _ in _run(settings, tmp_path, size, begun | resumed)] == [0] * size
    for name, sections in scenarios.items():
        told, weights = _found(tmp_path, name)
        few = _ROUNDED.get(name, 0)
        expected = _without_shares(alone[name][0])
        assert _without_shares(told) == pytest.approx(expected, rel=few or 1e-4, abs=few / 10 or 1e-5), name
        ours, theirs = _saved(tmp_path / name), _saved(before / name)
        assert {key: each.shape for key, each in ours.items()} == {key: each.shape for key, each in theirs.items()}
        assert _share_apart(weights, alone[name][1]) <= few, name
        assert _share_apart(ours, theirs) <= few, name
        _the_one_goes_on_as_the_others_do(settings(**sections), tmp_path / name, _found(tmp_path, f"{name}-on"), few)


def _the_one_goes_on_as_the_others_do(settings, folder, others, few):
    metrics, weights, learner = outcome(settings, ALONE, rows=FEW, start=folder)
    assert learner.optimizers["actor"].updates == 8
    expected = _without_shares(metrics)
    assert _without_shares(others[0]) == pytest.approx(expected, rel=few or 1e-5, abs=few / 10 or 1e-5)
    assert _share_apart(others[1], weights) <= 2 * few
