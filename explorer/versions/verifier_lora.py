"""What an adapter must be to be served: peft's two files and nothing else, that fit the base model's weights.

That it was trained on that very base model its numbers do not say; the probe does.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tuneloop.explorer.engines.proof.fingerprint import Fingerprint
from tuneloop.explorer.versions.safetensors import (
    EXPONENTS,
    StoredTensor,
    adapter_fingerprints_of,
    is_finite,
    tensors,
)
from tuneloop.shared.checkpoints.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tuneloop.shared.errors import CheckpointRejected

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"

#: What of peft would be added in another way than by two matrices for each layer, with what it is when unused.
_UNUSED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
}


def verify_adapter(actor: Path, *, base: Path, weights: Mapping[str, StoredTensor]) -> dict[str, Fingerprint]:
    """The fingerprints of an adapter, by the dtype that it is served in.

    Raises CheckpointRejected unless `actor` may be served on top of the base model, whose tensors are `weights`.
    """
    there = {file.name for file in actor.iterdir() if not file.name.startswith(".")}
    if odd := there ^ {ADAPTER_CONFIG, ADAPTER_WEIGHTS}:
        raise CheckpointRejected(
            f"an adapter is {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}; {min(odd)} is missing or extra"
        )
    config = _config(actor)
    rank, targets = _check(config, base)
    found = tensors(actor)
    _fits(found, weights, rank=rank, targets=targets)
    for name, tensor in found.items():
        if not is_finite(tensor):
            raise CheckpointRejected(f"{name} holds NaN or infinity")
    return adapter_fingerprints_of(found, scale=config["lora_alpha"] / rank)


def _config(actor: Path) -> dict[str, Any]:
    try:
        config = json.loads((actor / ADAPTER_CONFIG).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise CheckpointRejected(f"{ADAPTER_CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointRejected(f"{ADAPTER_CONFIG} is not a JSON object")
    return config


def _check(config: Mapping[str, Any], base: Path) -> tuple[int, frozenset[str]]:
    """Rank and targets."""
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if config.get("peft_type") != "LORA":
        raise CheckpointRejected(f"{ADAPTER_CONFIG}: peft_type is {config.get('peft_type')!r}, not 'LORA'")
    if type(rank) is not int or rank < 1:
        raise CheckpointRejected(f"{ADAPTER_CONFIG}: r is {rank!r}")
    if not isinstance(alpha, int | float) or not (math.isfinite(alpha) and alpha > 0):
        raise CheckpointRejected(f"{ADAPTER_CONFIG}: lora_alpha is {alpha!r}")
    if not (isinstance(targets, list) and targets and all(isinstance(each, str) for each in targets)):
        raise CheckpointRejected(f"{ADAPTER_CONFIG}: target_modules is {targets!r}")
    for key, unused in _UNUSED.items():
        if key in config and config[key] not in unused:
            raise CheckpointRejected(f"{ADAPTER_CONFIG}: {key} is {config[key]!r}, which is not served")
    of = config.get("base_model_name_or_path")
    if not isinstance(of, str) or Path(of).resolve() != base.resolve():
        raise CheckpointRejected(f"{ADAPTER_CONFIG}: it belongs to {of!r}, the base model is {base}")
    return rank, frozenset(targets)


def _fits(
    found: Mapping[str, StoredTensor], base: Mapping[str, StoredTensor], *, rank: int, targets: frozenset[str]
) -> None:
    layers = {name.removeprefix(_PREFIX).removesuffix(_DOWN).removesuffix(_UP) for name in found}
    wanted = {_PREFIX + layer + part for layer in layers for part in (_DOWN, _UP)}
    if missing := wanted ^ found.keys():
        raise CheckpointRejected(f"{min(missing)} has no counterpart, or is not part of an adapter")
    for layer in sorted(layers):
        weight = base.get(f"{layer}.weight")
        if weight is None or len(weight.shape) != 2 or layer.rpartition(".")[2] not in targets:
            raise CheckpointRejected(f"{layer} is not a layer of the base model that adapters are added to")
        outputs, inputs = weight.shape
        _require(found[_PREFIX + layer + _DOWN], f"{layer}{_DOWN}", (rank, inputs))
        _require(found[_PREFIX + layer + _UP], f"{layer}{_UP}", (outputs, rank))
    if without := _target_layers(base, targets) - layers:
        raise CheckpointRejected(f"{len(without)} layers have no adapter, {min(without)} among them")


def _target_layers(base: Iterable[str], targets: frozenset[str]) -> set[str]:
    """The layers of these names. Experts lie in other tensors on disk than in memory, where adapters are made."""
    layers = {name.removesuffix(".weight") for name in base if name.endswith(".weight") and ".experts." not in name}
    return {layer for layer in layers if layer.rpartition(".")[2] in targets}


def _require(tensor: StoredTensor, name: str, shape: tuple[int, int]) -> None:
    if tensor.shape != shape:
        raise CheckpointRejected(f"{name} has shape {tensor.shape}, not {shape}")
    if tensor.dtype not in EXPONENTS:
        raise CheckpointRejected(f"{name} is of type {tensor.dtype}")
