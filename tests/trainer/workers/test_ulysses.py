"""Ranks that share each packed row come to the numbers of one that reads it alone."""

import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.trainer.workers.rank import outcome
from tests.trainer.workers.test_ranks import DPO, GRPO, PPO, _found, _largest_difference, _run
from tuneloop.shared.errors import SettingsError
from tuneloop.trainer.batches.batch import Rows
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.models.ulysses import require_divisible
from tuneloop.trainer.parallel import ALONE

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 257,
    "pad_token_id": 256,
}
FAMILIES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


@pytest.fixture
def folders(base, tmp_path):
    """Models of two families with two heads of keys; the base model is a Qwen3 with one."""
    found = {"qwen3": base}
    for name, (config, kind) in FAMILIES.items():
        found[name] = tmp_path / name
        shutil.copytree(base, found[name])
        torch.manual_seed(5)
        kind(config(**SHAPE, tie_word_embeddings=name == "qwen2")).save_pretrained(found[name])
    return found


def _scenarios(folders):
    """Each family by another method; two heads of queries share one of keys in Qwen3."""
    again = {"activation_checkpointing": True}
    return {
        "qwen3": PPO | {"trainer": again},
        "qwen2": GRPO | {"model": {"model_path": str(folders["qwen2"]), "lora": {"rank": 2, "targets": ["q_proj"]}}},
        "llama": DPO | {"model": {"model_path": str(folders["llama"])}},
    }


@pytest.mark.parametrize(("size", "together"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.soak)])
def test_ranks_that_share_rows_come_to_the_numbers_of_one(settings, folders, tmp_path, size, together):
    scenarios = {
        name: (sections | {"trainer": sections.get("trainer", {}) | {"workers": size}}, {"rows": 6})
        for name, sections in _scenarios(folders).items()
    }
    ends = _run(settings, tmp_path, size, scenarios, together=together)
    assert [code for code, _ in ends] == [0] * size
    for name, (sections, _) in scenarios.items():
        told, weights = _found(tmp_path, name)
        metrics, expected, _ = outcome(settings(**sections), ALONE, rows=6)
        for key in [key for key in metrics if key.endswith("perf/useful_tokens")]:
            assert 0.8 < told.pop(key) <= metrics.pop(key) == 1
        assert told == pytest.approx(metrics, rel=1e-5, abs=1e-5), name
        assert _largest_difference(weights, expected) < 1e-5, name


@pytest.mark.soak
def test_four_ranks_share_two_heads_of_keys(settings, folders, tmp_path):
    sections = PPO | {"model": {"model_path": str(folders["llama"])}}
    assert [code for code, _ in _run(settings, tmp_path, 4, {"four": (sections, {})}, together=4)] == [0] * 4
    metrics, weights, _ = outcome(settings(**sections), ALONE)
    told, ours = _found(tmp_path, "four")
    assert told["1 actor/grad_norm"] == pytest.approx(metrics["1 actor/grad_norm"], rel=1e-5)
    assert _largest_difference(ours, weights) < 1e-5


@pytest.mark.soak
def test_memory_that_runs_out_within_a_shared_row_ends_all(settings, tmp_path):
    (one, _), (other, _) = _run(settings, tmp_path, 2, {"memory": (PPO, {"fail": "memory", "on": 1})}, together=2)
    assert one != 0 != other
    assert not (tmp_path / "memory.json").exists()


def test_a_row_is_made_long_enough_for_equal_parts_and_every_token_is_predicted_by_one():
    predicts = torch.tensor([0, 3, 4, 6])
    row = Rows(
        ids_BT=torch.arange(10, 17)[None],
        positions_BT=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]),
        predicts_N=predicts,
        lengths=(3, 4),
    )
    parts = [row.part(place, 4) for place in range(4)]
    assert torch.cat([part.ids_BT for part, _ in parts], 1).tolist() == [[*range(10, 17), 0]]
    assert torch.cat([part.positions_BT for part, _ in parts], 1).tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert [part.predicts_N.tolist() for part, _ in parts] == [[0], [1], [0], [0]]
    assert [(chosen.start, chosen.stop) for _, chosen in parts] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert {part.lengths for part, _ in parts} == {(3, 4, 1)}


def test_heads_that_do_not_divide_and_rows_that_are_padded_are_refused(settings):
    network = snapshot.load(settings(), None).actor.network
    require_divisible(network, 2)
    with pytest.raises(SettingsError, match="cannot share the heads of Qwen3ForCausalLM, 2 of queries and 1 of keys"):
        require_divisible(network, 4)
    network.set_attn_implementation("sdpa")
    with pytest.raises(SettingsError, match="padded"):
        require_divisible(network, 2)
