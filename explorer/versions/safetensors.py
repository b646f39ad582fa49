"""Reads safetensors files as strictly as the readers of engines do: what tensors they hold, and if one holds NaN."""

import json
import math
import multiprocessing
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tuneloop.explorer.engines.guard import die_with_parent
from tuneloop.explorer.engines.proof.fingerprint import (
    MODULUS,
    SERVED,
    Fingerprint,
    adapter_part_of,
    part_of,
    stored_sums,
)
from tuneloop.shared.errors import CheckpointRejected

_In = TypeVar("_In")
_Out = TypeVar("_Out")

#: Processes that read a large model or adapter at once, and from how many bytes on it is large. Counting holds Python's
#: lock.
_READERS, _LARGE = min(16, len(os.sched_getaffinity(0))), 32 << 20

#: Fewer bytes are read sooner than a process is started for them.
_LEAST = 16 << 20

#: Bytes that a process reads in one go, of embeddings too, which are a quarter of a small model.
_SPAN = 32 << 20

#: Bytes that are looked at at once: what is made of them stays in a processor's cache.
_BLOCK = 1 << 19

_LONGEST_HEADER = 100_000_000
_INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"

#: Exponent bits of the types that may be served, as unsigned integers: all ones means infinite or not a number.
EXPONENTS: Mapping[str, tuple[str, int]] = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}


class StoredTensor(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a Hugging Face folder, by name; an index, which engines go by, must name all files."""
    try:
        index = dict(json.loads((folder / _INDEX).read_bytes())["weight_map"])
        if not all(isinstance(file, str) and "/" not in file for file in index.values()):
            raise TypeError("it names a file that is not in this folder")
    except FileNotFoundError:
        index = None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointRejected(f"{_INDEX} cannot be read: {error!r}") from None
    files = (
        sorted(folder.glob(f"*{_SUFFIX}")) if index is None else [folder / name for name in sorted({*index.values()})]
    )
    found: dict[str, StoredTensor] = {}
    for file in sorted(files):
        header = _header(file)
        if twice := found.keys() & header.keys():
            raise CheckpointRejected(f"{min(twice)} is in two files, {file.name} is one of them")
        found |= header
    if not found:
        raise CheckpointRejected(f"{folder.name} holds no tensors in safetensors files")
    if index is not None and (astray := found.keys() ^ index.keys()):
        raise CheckpointRejected(f"{_INDEX} and the files do not agree about {min(astray)}")
    for name, file_name in (index or {}).items():
        if found[name].file.name != file_name:
            raise CheckpointRejected(f"{_INDEX} says that {name} is in {file_name}; it is in {found[name].file.name}")
    return found


def find_not_finite(found: Mapping[str, StoredTensor]) -> str | None:
    """The name of a tensor that holds a number that is infinite or none at all, if one does."""
    spans = [(name, span) for name, tensor in found.items() for span in _spans_of(tensor)]
    finite = _read_all(is_finite, [span for _, span in spans], found.values())
    return next((name for (name, _), is_so in zip(spans, finite, strict=True) if not is_so), None)


def is_finite(tensor: StoredTensor) -> bool:
    if tensor.dtype not in EXPONENTS or tensor.start == tensor.end:
        return True
    kind, exponent = EXPONENTS[tensor.dtype]
    bits = _bytes_of(tensor).view(kind)
    block = _BLOCK // bits.itemsize
    return not any(((bits[at : at + block] & exponent) == exponent).any() for at in range(0, len(bits), block))


def fingerprints_of(found: Mapping[str, StoredTensor], *, tied: bool) -> dict[str, Fingerprint]:
    """The fingerprint by dtype; empty where a type is not summed. Of `tied` models engines read no head."""
    return _add_up(
        (part_of(name), each, 1.0) for name, each in found.items() if not (tied and name == "lm_head.weight")
    )


def adapter_fingerprints_of(found: Mapping[str, StoredTensor], *, scale: float) -> dict[str, Fingerprint]:
    return _add_up((adapter_part_of(name), each, scale if ".lora_B." in name else 1.0) for name, each in found.items())


def _add_up(tensors: Iterable[tuple[str, StoredTensor, float]]) -> dict[str, Fingerprint]:
    chosen = list(tensors)
    if any(tensor.dtype not in EXPONENTS or tensor.start == tensor.end for _, tensor, _ in chosen):
        return {}
    groups = list(_groups_of(chosen))
    sums: dict[str, defaultdict[str, int]] = {served: defaultdict(int) for served in SERVED}
    for (part, _, _), totals in zip(groups, _read_all(_sums_of, groups, [each for _, each, _ in chosen]), strict=True):
        for served, total in totals.items():
            sums[served][part] = (sums[served][part] + total) % MODULUS
    return {served: dict(parts) for served, parts in sums.items()}


def _groups_of(
    chosen: Iterable[tuple[str, StoredTensor, float]],
) -> Iterator[tuple[str, list[StoredTensor], float]]:
    """What is summed in one go: of an adapter many small tensors, of a large one a piece."""
    alike: defaultdict[tuple[str, float, str], list[StoredTensor]] = defaultdict(list)
    for part, tensor, scale in chosen:
        alike[part, scale, tensor.dtype] += _spans_of(tensor)
    for (part, scale, _), spans in alike.items():
        group: list[StoredTensor] = []
        for span in spans:
            if group and sum(each.end - each.start for each in [*group, span]) > _SPAN:
                yield part, group, scale
                group = []
            group.append(span)
        yield part, group, scale


def _sums_of(group: tuple[str, list[StoredTensor], float]) -> dict[str, int]:
    _, spans, scale = group
    return stored_sums(map(_bytes_of, spans), spans[0].dtype, scale=scale)


def _spans_of(tensor: StoredTensor) -> Iterator[StoredTensor]:
    for start in range(tensor.start, tensor.end, _SPAN):
        yield tensor._replace(start=start, end=min(tensor.end, start + _SPAN))


def _bytes_of(tensor: StoredTensor) -> npt.NDArray[np.uint8]:
    return np.memmap(tensor.file, dtype=np.uint8, mode="r", offset=tensor.start, shape=(tensor.end - tensor.start,))


def _read_all(read: Callable[[_In], _Out], each: Sequence[_In], tensors: Iterable[StoredTensor]) -> list[_Out]:
    """`read` of each; by several processes where the tensors are large, and this process has one thread to fork."""
    size = sum(tensor.end - tensor.start for tensor in tensors)
    if size < _LARGE or threading.active_count() > 1:
        return [read(one) for one in each]
    fork, readers = multiprocessing.get_context("fork"), min(_READERS, 1 + size // _LEAST)
    with ProcessPoolExecutor(readers, mp_context=fork, initializer=die_with_parent) as pool:
        return list(pool.map(read, each))


def _header(file: Path) -> dict[str, StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise CheckpointRejected(f"{file.name}: its header claims {length} bytes, the file has {size}")
            header = json.loads(opened.read(length).decode())
        if not isinstance(header, dict):
            raise ValueError("it is not a JSON object")
        # What safetensors or transformers refuse.
        if (metadata := header.pop("__metadata__", None)) is not None:
            if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
                raise ValueError("its metadata are not texts")
            if metadata.get("format") != "pt":
                raise ValueError(f"its metadata say format {metadata.get('format')!r}, not 'pt'")
        found = {name: _tensor(name, entry, file, 8 + length) for name, entry in header.items()}
        _cover(found, 8 + length, size)
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise CheckpointRejected(f"{file.name}: its header is damaged: {error}") from None
    return found


def _tensor(name: str, entry: object, file: Path, offset: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name} is not a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"the dtype of {name} is {dtype!r}")
    if not _counts(shape):
        raise ValueError(f"the shape of {name} is {shape!r}")
    if not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the data_offsets of {name} are {offsets!r}, not two places")
    return StoredTensor(file, dtype, tuple(shape), offset + offsets[0], offset + offsets[1])


def _counts(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(each) is int and each >= 0 for each in numbers)


def _cover(found: Mapping[str, StoredTensor], start: int, end: int) -> None:
    """Raise ValueError unless the tensors fill the file from `start` to `end`, each as long as its shape says."""
    for name, tensor in sorted(found.items(), key=lambda each: (each[1].start, each[1].end)):
        if tensor.start != start or tensor.end < start:
            raise ValueError(f"{name} lies at bytes {tensor.start} to {tensor.end}, which do not follow byte {start}")
        if tensor.dtype in EXPONENTS:
            wanted = math.prod(tensor.shape) * np.dtype(EXPONENTS[tensor.dtype][0]).itemsize
            if tensor.end - tensor.start != wanted:
                raise ValueError(
                    f"{name}, {tensor.dtype} of shape {tensor.shape}, has {tensor.end - tensor.start} bytes"
                )
        start = tensor.end
    if start != end:
        raise ValueError(f"the tensors end at byte {start} of {end}")
