"""Sums over weights are the same in files and in engines, however these hold them, and differ with any element."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tuneloop.explorer.engines.proof import vllm_worker
from tuneloop.explorer.engines.proof.fingerprint import MODULUS, differing_from_files, differing_parts
from tuneloop.explorer.versions.safetensors import adapter_fingerprints_of, fingerprints_of, tensors

pytestmark = pytest.mark.contract

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Weights = dict[str, torch.Tensor]


def weights(stored: torch.dtype = torch.bfloat16) -> Weights:
    """A model of two layers with 4 heads and 2 of keys and values, 2 numbers each."""
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}
    for layer in ("model.layers.0.", "model.layers.1."):
        of_it = {"q_proj.weight": (8, 8), "k_proj.weight": (4, 8), "v_proj.weight": (4, 8), "o_proj.weight": (8, 8)}
        shapes |= {f"{layer}self_attn.{name}": shape for name, shape in of_it.items()}
        shapes |= {f"{layer}mlp.gate_proj.weight": (8, 8), f"{layer}mlp.up_proj.weight": (8, 8)}
    return {name: torch.randn(shape).to(stored) for name, shape in shapes.items()}


def in_files(found: Weights, folder: Path, *, served: str = "bfloat16", tied: bool = False) -> Mapping[str, int]:
    folder.mkdir(exist_ok=True)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return fingerprints_of(tensors(folder), tied=tied)[served]


def module(kind: str, weight: torch.Tensor, **attributes: int) -> nn.Module:
    """A layer as vLLM has it, by the name of its class."""
    found = type(kind, (nn.Module,), {})()
    found.weight = nn.Parameter(weight, requires_grad=False)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def engine_model(found: Weights, rank: int = 0, size: int = 1, *, tied: bool = False) -> nn.Module:
    """What one of `size` workers of an engine holds: fused, sharded, replicated, padded."""
    padded = torch.cat([found["model.embed_tokens.weight"], torch.zeros(2, 8, dtype=torch.bfloat16)])
    head = torch.cat([found["lm_head.weight"], torch.zeros(2, 8, dtype=torch.bfloat16)])

    def share(tensor: torch.Tensor, axis: int = 0, parts: int = size) -> torch.Tensor:
        return tensor.chunk(parts, axis)[rank * parts // size].contiguous()

    layers = nn.ModuleList()
    for number in range(2):
        of_it = {name.rsplit(".", 2)[1]: tensor for name, tensor in found.items() if f"layers.{number}." in name}
        kv = min(size, 2)
        qkv = torch.cat([share(of_it["q_proj"]), share(of_it["k_proj"], parts=kv), share(of_it["v_proj"], parts=kv)])
        heads = {"num_heads": 4 // size, "head_size": 2, "num_kv_head_replicas": size // kv}
        layer = nn.Module()
        layer.qkv_proj = module("QKVParallelLinear", qkv.t().contiguous().t(), tp_size=size, **heads)
        layer.o_proj = module("RowParallelLinear", share(of_it["o_proj"], 1), tp_size=size)
        gate_up = torch.cat([share(of_it["gate_proj"], parts=size), share(of_it["up_proj"], parts=size)])
        layer.gate_up_proj = module("MergedColumnParallelLinear", gate_up, tp_size=size)
        layers.append(layer)
    model = nn.Module()
    model.embed_tokens = module("VocabParallelEmbedding", share(padded), tp_size=size)
    model.layers = layers
    model.norm = module("RMSNorm", found["model.norm.weight"].clone())
    model.lm_head = model.embed_tokens if tied else module("ParallelLMHead", share(head), tp_size=size)
    return model


def in_engine(
    found: Weights, monkeypatch: pytest.MonkeyPatch, size: int = 1, *, tied: bool = False
) -> Mapping[str, int]:
    """The sums of all workers of an engine together."""
    sums: dict[str, int] = {}
    for rank in range(size):
        monkeypatch.setattr(vllm_worker, "_rank", lambda rank=rank: rank)
        worker = vllm_worker.FingerprintWorker()
        worker.model_runner = SimpleNamespace()
        worker.model_runner.model = engine_model(found, rank, size, tied=tied)
        worker.model_config = type("Config", (), {"dtype": torch.bfloat16})
        answer = worker.tuneloop_fingerprint()
        assert answer["dtype"] == "bfloat16"
        for part, total in answer["sums"].items():
            sums[part] = (sums.get(part, 0) + total) % MODULUS
    return sums


@pytest.mark.parametrize("served", list(_TYPES))
@pytest.mark.parametrize("stored", [torch.float64, *_TYPES.values()], ids=str)
def test_what_is_stored_in_one_type_is_summed_as_it_is_served_in_another(
    tmp_path: Path, stored: torch.dtype, served: str
) -> None:
    torch.manual_seed(1)
    tensor = torch.cat([torch.randn(5000) * 10.0**power for power in range(-8, 4)]).to(stored)
    found = in_files({"x": tensor}, tmp_path, served=served)
    assert found == vllm_worker._add_up([("", tensor.to(_TYPES[served]))])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_engine_of_any_number_of_workers_sums_what_the_files_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, tied: bool
) -> None:
    """With four workers the two heads of keys and values are there twice."""
    found = weights()
    assert in_engine(found, monkeypatch, size, tied=tied) == in_files(found, tmp_path, tied=tied)


def next_number(tensor: torch.Tensor, at: int) -> torch.Tensor:
    """One element of bfloat16 one unit further from 0."""
    found = tensor.clone()
    found.view(torch.int16).view(-1)[at] += 1
    return found


def test_each_planted_fault_changes_the_sums_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, before = weights(), {name: tensor * 0.9 for name, tensor in weights().items()}
    expected = in_files(right, tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    others = {each: each.replace("layers.0.", "layers.1.") for each in right if "layers.0." in each}
    swapped = right | {one: right[other] for one, other in others.items()}
    swapped |= {other: right[one] for one, other in others.items()}
    skipped = right | {each: before[each] for each in right if "layers.0." in each}
    faults = {
        "a unit": (right | {name: next_number(right[name], 5)}, ["1"]),
        "a skipped layer": (skipped, ["0"]),
        "the version before": (before, ["0", "1", ""]),
        "swapped layers": (swapped, ["0", "1"]),
        "a head of the version before": (right | {"lm_head.weight": before["lm_head.weight"]}, [""]),
    }
    for fault, (held, parts) in faults.items():
        for size in (1, 2):
            assert differing_parts(in_engine(held, monkeypatch, size), expected) == parts, fault


def test_tied_halves_that_are_no_longer_one_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = weights()
    untied = found | {"lm_head.weight": found["model.embed_tokens.weight"].clone()}
    assert differing_parts(in_engine(untied, monkeypatch), in_files(found, tmp_path, tied=True)) == [""]


def adapter(rank: int = 2) -> Weights:
    """An adapter to the layers of `weights()`."""
    torch.manual_seed(3)
    found: Weights = {}
    for name, weight in weights().items():
        if name.startswith("model.layers."):
            layer, (outputs, inputs) = f"base_model.model.{name.removesuffix('.weight')}", weight.shape
            found[f"{layer}.lora_A.weight"] = torch.randn(rank, inputs)
            found[f"{layer}.lora_B.weight"] = torch.randn(outputs, rank)
    return found


def adapted_module(kind: str, tensors: list[tuple[torch.Tensor, torch.Tensor]], **attributes: int) -> Any:
    """A layer with an adapter in the second of its two places, as vLLM has it."""
    found = SimpleNamespace(base_layer=module(kind, torch.zeros(1), **attributes))
    found.lora_a_stacked = tuple(torch.stack([torch.zeros_like(a), a])[:, None] for a, _ in tensors)
    found.lora_b_stacked = tuple(torch.stack([torch.zeros_like(b), b])[:, None] for _, b in tensors)
    return found


def adapter_in_engine(found: Weights, rank: int, size: int, dtype: torch.dtype, scale: float) -> Any:
    """What one of `size` workers holds of an adapter."""
    kv = min(size, 2)

    def half(layer: str, which: str) -> torch.Tensor:
        tensor = found[f"base_model.model.model.layers.{layer}.lora_{which}.weight"].to(dtype, copy=True)
        if which == "B":
            tensor *= scale
        return tensor

    def columns(layer: str, parts: int = size) -> tuple[torch.Tensor, torch.Tensor]:
        return half(layer, "A"), half(layer, "B").chunk(parts, 0)[rank * parts // size]

    modules = {}
    for number in range(2):
        attention, mlp = f"{number}.self_attn", f"{number}.mlp"
        heads = {"num_heads": 4 // size, "head_size": 2, "num_kv_head_replicas": size // kv}
        qkv = [columns(f"{attention}.q_proj"), *(columns(f"{attention}.{each}_proj", kv) for each in "kv")]
        modules[f"model.layers.{number}.self_attn.qkv_proj"] = adapted_module(
            "QKVParallelLinear", qkv, tp_size=size, **heads
        )
        output = half(f"{attention}.o_proj", "A").chunk(size, 1)[rank], half(f"{attention}.o_proj", "B")
        modules[f"model.layers.{number}.self_attn.o_proj"] = adapted_module("RowParallelLinear", [output], tp_size=size)
        gate_up = [columns(f"{mlp}.gate_proj"), columns(f"{mlp}.up_proj")]
        modules[f"model.layers.{number}.mlp.gate_up_proj"] = adapted_module(
            "MergedColumnParallelLinear", gate_up, tp_size=size
        )
    config = SimpleNamespace(fully_sharded_loras=False, lora_dtype=dtype)
    manager = SimpleNamespace(lora_config=config, modules=modules, lora_index_to_id=[None, 7])
    return SimpleNamespace(_adapter_manager=manager)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 2.0, 1.7])
@pytest.mark.parametrize("served", list(_TYPES))
def test_an_adapter_is_summed_as_it_is_scaled_and_shared(tmp_path: Path, size: int, scale: float, served: str) -> None:
    found = adapter()
    save_file(found, tmp_path / "adapter_model.safetensors")
    expected = adapter_fingerprints_of(tensors(tmp_path), scale=scale)[served]
    shares = []
    for rank in range(size):
        held = adapter_in_engine(found, rank, size, _TYPES[served], scale)
        sums = vllm_worker._adapters(held, rank, _TYPES[served])
        shares.append({"dtype": served, "sums": {"0": 1}, "adapters": sums | {"9": {"adapter 0": 5}}})
    wanted = {served: {"0": size, **expected}}
    assert differing_from_files(shares, wanted) == []
    other = {served: {"0": size, **expected, "adapter 1": expected["adapter 1"] + 1}}
    assert differing_from_files(shares, other) == ["adapter 1"]
    assert differing_from_files([share | {"adapters": None} for share in shares], wanted) is None


QUANTISED = module("Linear", torch.zeros(4, dtype=torch.int8))


@pytest.mark.parametrize("model", [QUANTISED, object()], ids=["quantised", "none"])
def test_weights_that_are_not_known_have_no_sums(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr(vllm_worker, "_rank", lambda: 0)
    worker = vllm_worker.FingerprintWorker()
    worker.model_runner = SimpleNamespace(model=model)
    worker.model_config = type("Config", (), {"dtype": torch.float16})
    assert worker.tuneloop_fingerprint() == {"dtype": "float16", "sums": None, "adapters": {}}
