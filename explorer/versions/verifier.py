"""Reads a checkpoint before any engine does, in a process of its own: a bad file kills the engine that opens it.

    python -m tuneloop.explorer.versions.verifier CHECKPOINT MANIFEST_SHA256 VERSION BASE_MODEL [JOB_FOLDER]

Without arguments it waits for these as a JSON list on standard input: a process that has been started ahead.
Ends with 0 and the fingerprints of its weights as JSON, or with the reason on standard output: with 1 if it must not be
served, with UNREADABLE if that may pass.
What it cannot see is wrong numbers that are numbers: those are for the probe.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tuneloop.explorer.engines.proof.fingerprint import Fingerprint
from tuneloop.explorer.versions.safetensors import (
    EXPONENTS,
    StoredTensor,
    adapter_fingerprints_of,
    find_not_finite,
    fingerprints_of,
    tensors,
)
from tuneloop.shared.checkpoints import (
    ACTOR,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CheckpointStore,
    check_files,
    read_manifest,
)
from tuneloop.shared.errors import CheckpointRejected, CheckpointUnreadable

_T = TypeVar("_T")

UNREADABLE = 75

_LOW = 10

#: Architectures whose weights vLLM holds as they are stored, but for their order, fusing and sharding.
_AS_STORED = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

_PICKLES = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pth"})

#: What safetensors calls the types that a manifest may name.
_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}

#: Keys of config.json that change nothing about what the weights mean. The trainer writes its own dtype.
_HARMLESS = frozenset(
    {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "_commit_hash", "use_cache"}
    | {"output_attentions", "output_hidden_states", "return_dict"}
)

#: Beside config.json and the weights, files of these kinds decide what token ids mean, or are run.
_COMPANIONS = frozenset({".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"})
_INDEX = ".index.json"

#: What may be there though the base model has none: transformers makes the first of config.json, and that is the base
#: model's, so it names no code that the base model lacks.
_MAY_COME = ("generation_config.json", ".py")


_ADAPTER_PREFIX = "base_model.model."
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


def verify(checkpoint: Path, *, manifest_sha256: str, version: int, base: Path) -> dict[str, Fingerprint]:
    """The fingerprints, by dtype, of the weights in `checkpoint` as an engine holds them that serves them.

    An adapter's are its own alone. They are empty for architectures whose weights engines are not known to hold as they
    are stored. Raises CheckpointRejected unless the actor may be served in place of `base`, and CheckpointUnreadable if
    the folder cannot be read, or is gone when it has been read.

    Without `manifest_sha256` it is the base model itself, of which nothing is registered: it can be read, or not.
    """
    if not manifest_sha256:
        return _fingerprints(_of_base(_config, base), _of_base(tensors, base))
    try:
        manifest = read_manifest(checkpoint, sha256=manifest_sha256)
        if manifest.version != version:
            raise CheckpointRejected(f"its manifest is of version {manifest.version}")
        check_files(checkpoint, manifest, folder=ACTOR)
        for file in manifest.files:
            if Path(file.path).suffix in _PICKLES:
                raise CheckpointRejected(f"{file.path} may hold a pickle")
        actor = checkpoint / ACTOR
        if manifest.kind == "lora":
            return verify_adapter(actor, base=base, weights=_of_base(tensors, base))
        config, wanted = _config(actor), _of_base(_config, base)
        _same_config(config, wanted)
        _same_companions(actor, base)
        found = tensors(actor)
        _same_tensors(
            found,
            _of_base(tensors, base),
            tied=bool(wanted.get("tie_word_embeddings")),
            dtype=_TYPES.get(manifest.dtype),
        )
        if name := find_not_finite(found):
            raise CheckpointRejected(f"{name} in {found[name].file.name} holds NaN or infinity")
        return _fingerprints(config, found)
    except OSError as error:
        raise CheckpointUnreadable(f"{checkpoint.name}: {error}") from None
    except CheckpointRejected:
        read_manifest(checkpoint, sha256=manifest_sha256)  # Of a folder that went away meanwhile nothing is known.
        raise


def _fingerprints(config: Mapping[str, Any], found: Mapping[str, StoredTensor]) -> dict[str, Fingerprint]:
    if config.get("quantization_config") or not _AS_STORED.issuperset(config.get("architectures") or ("none",)):
        return {}
    return fingerprints_of(found, tied=bool(config.get("tie_word_embeddings")))


def _of_base(read: Callable[[Path], _T], base: Path) -> _T:
    """What was read of the base model; that it cannot be read is not the version's fault, and may pass."""
    try:
        return read(base)
    except (CheckpointRejected, OSError) as error:
        raise CheckpointUnreadable(f"the base model in {base} cannot be read: {error}") from None


def _config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    try:
        config = json.loads((folder / name).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise CheckpointRejected(f"{name} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointRejected(f"{name} is not a JSON object")
    return config


def _same_config(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in sorted((found.keys() | wanted.keys()) - _HARMLESS):
        if found.get(key) != wanted.get(key):
            raise CheckpointRejected(
                f"config.json: {key} is {found.get(key)!r}, the base model's is {wanted.get(key)!r}"
            )
    for key in ("dtype", "torch_dtype"):
        if found.get(key) not in {None, *_TYPES} and found.get(key) != wanted.get(key):
            raise CheckpointRejected(f"config.json: {key} is {found.get(key)!r}")


def _same_companions(actor: Path, base: Path) -> None:
    """Tokenizer, templates, generation settings and code are the base model's, all of them."""
    found, wanted = _companions(actor), _companions(base)
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            raise CheckpointRejected(f"{name} is missing, the base model has it")
        if name not in wanted and not name.endswith(_MAY_COME):
            raise CheckpointRejected(f"{name} is not the base model's: that has none")
        same = name not in wanted or found[name].read_bytes() == wanted[name].read_bytes()
        if not same and _meaning(found[name]) != _meaning(wanted[name]):
            raise CheckpointRejected(f"{name} is not the base model's: they differ")


def _companions(folder: Path) -> dict[str, Path]:
    return {
        file.name: file
        for file in folder.iterdir()
        if file.suffix in _COMPANIONS and file.name != "config.json" and not file.name.endswith(_INDEX)
    }


def _meaning(file: Path) -> Any:
    """What a file says; of JSON but for the release that wrote it."""
    text = file.read_bytes()
    try:
        value = json.loads(text) if file.suffix == ".json" else text
    except (ValueError, RecursionError):
        return text
    return {key: each for key, each in value.items() if key not in _HARMLESS} if isinstance(value, dict) else value


def _same_tensors(
    found: Mapping[str, StoredTensor], wanted: Mapping[str, StoredTensor], *, tied: bool, dtype: str | None
) -> None:
    """`dtype` is the type that the manifest says the weights have."""
    # A model with tied embeddings may or may not store the head a second time.
    spare = {"lm_head.weight"} if tied else set()
    if missing := wanted.keys() - found.keys() - spare:
        raise CheckpointRejected(f"{len(missing)} tensors are missing, {min(missing)} among them")
    if extra := found.keys() - wanted.keys() - spare:
        raise CheckpointRejected(f"{len(extra)} tensors are not the base model's, {min(extra)} among them")
    for name in sorted(found.keys() & wanted.keys()):
        if found[name].shape != wanted[name].shape:
            raise CheckpointRejected(f"{name} has shape {found[name].shape}, the base model's has {wanted[name].shape}")
        # Some models keep a few tensors in float32 whatever the rest is.
        if found[name].dtype not in {"F32", dtype, wanted[name].dtype}:
            raise CheckpointRejected(
                f"{name} is of type {found[name].dtype}; the base model's is {wanted[name].dtype}, "
                f"the manifest says {dtype}"
            )


def verify_adapter(actor: Path, *, base: Path, weights: Mapping[str, StoredTensor]) -> dict[str, Fingerprint]:
    """The fingerprints of an adapter, by the dtype that it is served in.

    Raises CheckpointRejected unless it is peft's two files and nothing else, which fit the base model's `weights`. That
    it was trained on that very base model its numbers do not say; the probe does.
    """
    there = {file.name for file in actor.iterdir() if not file.name.startswith(".")}
    if odd := there ^ {ADAPTER_CONFIG, ADAPTER_WEIGHTS}:
        raise CheckpointRejected(
            f"an adapter is {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}; {min(odd)} is missing or extra"
        )
    config = _config(actor, ADAPTER_CONFIG)
    rank, targets = _check_adapter_config(config, base)
    found = tensors(actor)
    _fits(found, weights, rank=rank, targets=targets)
    if name := find_not_finite(found):
        raise CheckpointRejected(f"{name} holds NaN or infinity")
    return adapter_fingerprints_of(found, scale=config["lora_alpha"] / rank)


def _check_adapter_config(config: Mapping[str, Any], base: Path) -> tuple[int, frozenset[str]]:
    """Rank and targets of an adapter that is served."""
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
    layers = {name.removeprefix(_ADAPTER_PREFIX).removesuffix(_DOWN).removesuffix(_UP) for name in found}
    wanted = {_ADAPTER_PREFIX + layer + part for layer in layers for part in (_DOWN, _UP)}
    if missing := wanted ^ found.keys():
        raise CheckpointRejected(f"{min(missing)} has no counterpart, or is not part of an adapter")
    for layer in sorted(layers):
        weight = base.get(f"{layer}.weight")
        if weight is None or len(weight.shape) != 2 or layer.rpartition(".")[2] not in targets:
            raise CheckpointRejected(f"{layer} is not a layer of the base model that adapters are added to")
        outputs, inputs = weight.shape
        _require(found[_ADAPTER_PREFIX + layer + _DOWN], f"{layer}{_DOWN}", (rank, inputs))
        _require(found[_ADAPTER_PREFIX + layer + _UP], f"{layer}{_UP}", (outputs, rank))
    # Experts lie in other tensors on disk than in memory, where adapters are made.
    named = {name.removesuffix(".weight") for name in base if name.endswith(".weight") and ".experts." not in name}
    if without := {layer for layer in named if layer.rpartition(".")[2] in targets} - layers:
        raise CheckpointRejected(f"{len(without)} layers have no adapter, {min(without)} among them")


def _require(tensor: StoredTensor, name: str, shape: tuple[int, int]) -> None:
    if tensor.shape != shape:
        raise CheckpointRejected(f"{name} has shape {tensor.shape}, not {shape}")
    if tensor.dtype not in EXPONENTS:
        raise CheckpointRejected(f"{name} is of type {tensor.dtype}")


def main() -> int:
    """Verify what argv names, or standard input."""
    arguments = sys.argv[1:] or json.loads(sys.stdin.read() or "[]")
    if not arguments:  # Who started it has ended.
        return 0
    checkpoint, sha256, version, base, *job_dir = arguments
    os.nice(_LOW)  # Engines and workers that share these processors are answering requests.
    try:
        for folder in job_dir:
            CheckpointStore(Path(folder)).check_place(Path(checkpoint))
        found = verify(Path(checkpoint), manifest_sha256=sha256, version=int(version), base=Path(base))
    except CheckpointRejected as error:
        sys.stdout.write(str(error))
        return UNREADABLE if isinstance(error, CheckpointUnreadable) else 1
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
