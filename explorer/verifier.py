"""Reads a checkpoint before any engine does, in a process of its own: a bad file kills the engine that opens it.

    python -m explorer.verifier CHECKPOINT MANIFEST_SHA256 VERSION BASE_MODEL

Ends with 0, or with the reason on standard output: with 1 if it must not be served, with UNREADABLE if that may pass.
"""

import json
import math
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shared.checkpoint import ACTOR, check_files, read_manifest
from shared.errors import CheckpointRejected, CheckpointUnreadable

_PICKLES = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pth"})
_LONGEST_HEADER = 100_000_000

UNREADABLE = 75

#: Exponent bits of the types that may be served, as unsigned integers: all ones means infinite or not a number.
_EXPONENTS: Mapping[str, tuple[str, int]] = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}

#: What a configuration must share with the base model's for the weights to mean the same.
_SHAPE_KEYS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)


class Tensor(NamedTuple):
    """Where a tensor lies: its type, its shape, and its bytes in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def verify(checkpoint: Path, *, manifest_sha256: str, version: int, base: Path) -> None:
    """Raise CheckpointRejected unless the actor in `checkpoint` may be served in place of `base`."""
    manifest = read_manifest(checkpoint, sha256=manifest_sha256)
    if manifest.version != version:
        raise CheckpointRejected(f"its manifest is of version {manifest.version}")
    check_files(checkpoint, manifest, folder=ACTOR)
    for file in manifest.files:
        if Path(file.path).suffix in _PICKLES:
            raise CheckpointRejected(f"{file.path} may hold a pickle")
    _same_shape(_config(checkpoint / ACTOR), _config(base))
    found, wanted = tensors(checkpoint / ACTOR), tensors(base)
    _same_tensors(found, wanted, tied=bool(_config(base).get("tie_word_embeddings")))
    for name, tensor in found.items():
        if not _finite(tensor):
            raise CheckpointRejected(f"{name} holds NaN or infinity")


def tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face folder, by name, read off the headers of its safetensors files."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        header = _header(file)
        if twice := found.keys() & header.keys():
            raise CheckpointRejected(f"{min(twice)} is in two files")
        found |= header
    if not found:
        raise CheckpointRejected(f"{folder} holds no safetensors")
    return found


def _header(file: Path) -> dict[str, Tensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size, _LONGEST_HEADER):
                raise CheckpointRejected(f"{file.name}: its header claims {length} bytes of {size}")
            header = json.loads(opened.read(length))
        found = {
            name: Tensor(file, str(entry["dtype"]), tuple(entry["shape"]), *_span(entry, 8 + length))
            for name, entry in header.items()
            if name != "__metadata__"
        }
        _cover(found.values(), 8 + length, size)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointRejected(f"{file.name}: its header is damaged: {error}") from None
    return found


def _span(entry: Mapping[str, Any], offset: int) -> tuple[int, int]:
    start, end = entry["data_offsets"]
    if not (isinstance(start, int) and isinstance(end, int)):
        raise TypeError(f"{entry['data_offsets']} are not two places")
    return offset + start, offset + end


def _cover(found: Collection[Tensor], start: int, end: int) -> None:
    """Raise ValueError unless the tensors fill the file from `start` to `end`, each as long as its shape says."""
    for tensor in sorted(found, key=lambda each: (each.start, each.end)):
        if tensor.start != start or tensor.end < start:
            raise ValueError(f"bytes {tensor.start} to {tensor.end} do not follow byte {start}")
        if tensor.dtype in _EXPONENTS:
            wanted = math.prod(tensor.shape) * np.dtype(_EXPONENTS[tensor.dtype][0]).itemsize
            if tensor.end - tensor.start != wanted:
                raise ValueError(f"{tensor.dtype} of shape {tensor.shape} has {tensor.end - tensor.start} bytes")
        start = tensor.end
    if start != end:
        raise ValueError(f"the tensors end at byte {start} of {end}")


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointRejected(f"{folder}/config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointRejected(f"{folder}/config.json is no object")
    return config


def _same_shape(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in _SHAPE_KEYS:
        if found.get(key) != wanted.get(key):
            raise CheckpointRejected(
                f"config.json: {key} is {found.get(key)!r}, the base model's is {wanted.get(key)!r}"
            )


def _same_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, tied: bool) -> None:
    # A model with tied embeddings may or may not store the head a second time.
    spare = {"lm_head.weight"} if tied else set()
    if missing := wanted.keys() - found.keys() - spare:
        raise CheckpointRejected(f"{len(missing)} tensors are missing, {min(missing)} among them")
    if extra := found.keys() - wanted.keys() - spare:
        raise CheckpointRejected(f"{len(extra)} tensors are not the base model's, {min(extra)} among them")
    for name in found.keys() & wanted.keys():
        if found[name].shape != wanted[name].shape:
            raise CheckpointRejected(f"{name} has shape {found[name].shape}, the base model's has {wanted[name].shape}")
        if found[name].dtype not in {*_EXPONENTS, wanted[name].dtype}:
            raise CheckpointRejected(f"{name} is of type {found[name].dtype}")


def _finite(tensor: Tensor) -> bool:
    if tensor.dtype not in _EXPONENTS or tensor.start == tensor.end:
        return True
    kind, exponent = _EXPONENTS[tensor.dtype]
    count = (tensor.end - tensor.start) // np.dtype(kind).itemsize
    bits = np.memmap(tensor.file, dtype=kind, mode="r", offset=tensor.start, shape=(count,))
    block = 1 << 24
    return not any(((bits[at : at + block] & exponent) == exponent).any() for at in range(0, count, block))


def main() -> int:
    """Verify what argv names."""
    checkpoint, sha256, version, base = sys.argv[1:]
    try:
        verify(Path(checkpoint), manifest_sha256=sha256, version=int(version), base=Path(base))
    except CheckpointRejected as error:
        sys.stdout.write(str(error))
        return UNREADABLE if isinstance(error, CheckpointUnreadable) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
