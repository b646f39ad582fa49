"""Each rank has masters and moments of its shards alone; together they are, and are saved as, those of one rank."""

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.workers.rank import outcome
from tests.trainer.workers.test_ranks import PPO, _found, _run
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.ranks.ranks import ALONE, BLOCK, cut

BITS = {"algorithm_type": "ppo", "optimizer": {"lr": 1e-3, "bits": 8}, "critic_optimizer": {"lr": 1e-3}}
#: Every sequence is a micro-batch of its own, so that 16 bits round the same on however many ranks.
ALONE_EACH = {"dtype": "bfloat16", "micro_batch_tokens": 1}
FEW = 4
SCENARIOS = {
    "bits": {"algorithm": BITS},
    "lora": PPO | {"model": {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}},
    "lora-bits": {"algorithm": BITS, "model": {"lora": {"rank": 2, "base_bits": 4}}},
    "half": PPO | {"trainer": ALONE_EACH | {"optimizer_offload": True}},
}


def test_shards_have_every_number_once_and_about_as_many_each_and_begin_at_blocks():
    counts = {"a": 10, "b": 5000, "c": 3, "d": 256 * 7 + 1}
    for ranks in (1, 2, 3, 7):
        shards = cut(counts, ranks)
        for name, count in counts.items():
            own = [each for each in shards if each.name == name]
            assert [each.start for each in own] == [0, *(each.stop for each in own[:-1])]
            assert own[-1].stop == count
            assert all(each.start % BLOCK == 0 and each.length > 0 for each in own)
        sizes = [sum(each.length for each in shards if each.owner == rank) for rank in range(ranks)]
        assert max(sizes) <= sum(counts.values()) / ranks + 2 * BLOCK


def _saved(folder):
    return {
        f"{part}.{name}": each
        for part in ("actor", "critic")
        for name, each in load_file(folder / "trainer_state" / f"{part}.safetensors").items()
    }


def _share_apart(one, other):
    """The share of numbers that differ by more than 1e-5."""
    assert one.keys() == other.keys()
    apart = [(each.float() - other[name].float()).abs() > 1e-5 for name, each in one.items()]
    return float(torch.cat([each.flatten() for each in apart]).float().mean())


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_the_state_of_several_ranks_is_that_of_one_and_is_gone_on_with_by_any_number(settings, tmp_path, size):
    alone, before = {}, tmp_path / "before"
    before.mkdir()
    for name, sections in SCENARIOS.items():
        metrics, weights, learner = outcome(settings(**sections), ALONE, rows=FEW)
        (before / name).mkdir()
        snapshot.save(learner, before / name, base=settings().model.model_path)
        alone[name] = metrics, weights
    begun = {name: (sections, {"save": True, "rows": FEW}) for name, sections in SCENARIOS.items()}
    resumed = {f"{name}-on": (each, {"from": str(before / name), "rows": FEW}) for name, each in SCENARIOS.items()}
    assert [code for code, _ in _run(settings, tmp_path, size, begun | resumed)] == [0] * size
    for name, sections in SCENARIOS.items():
        told, weights = _found(tmp_path, name)
        assert told == pytest.approx(alone[name][0], rel=1e-4, abs=1e-4 if name == "half" else 1e-5), name
        ours, theirs = _saved(tmp_path / name), _saved(before / name)
        assert {key: each.shape for key, each in ours.items()} == {key: each.shape for key, each in theirs.items()}
        # Of numbers rounded to fewer bits some few fall to the other side.
        few = {"half": 0.02, "bits": 0.003, "lora-bits": 0.003}.get(name, 0)
        assert _share_apart(weights, alone[name][1]) <= few, name
        assert _share_apart(ours, theirs) <= few, name
        _the_one_goes_on_as_the_others_do(settings(**sections), tmp_path / name, _found(tmp_path, f"{name}-on"), few)


def _the_one_goes_on_as_the_others_do(settings, folder, others, few):
    metrics, weights, learner = outcome(settings, ALONE, rows=FEW, start=folder)
    assert learner.optimizers["actor"].updates == 8
    assert others[0] == pytest.approx(metrics, rel=1e-3 if few else 1e-5, abs=1e-3 if few else 1e-5)
    assert _share_apart(others[1], weights) <= 2 * few
