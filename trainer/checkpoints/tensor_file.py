"""Writes safetensors files so that nobody waits long for the disk beside them.

What a process writes lies in memory until the kernel, or somebody's fsync, brings it to the disk; and an fsync on a
journaling file system waits for what others have written before. A checkpoint written at the speed of memory keeps
requests, which are on disk before they are acknowledged, waiting for seconds. So it is brought to disk piece by piece.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import modeling_utils

#: Bytes that are written before they are brought to disk. A disk of 500 MB/s takes a thirtieth of a second for them.
PIECE = 16 << 20

#: What save_pretrained calls in transformers 5.5 to 5.19.
_WRITER = "safe_save_file"

_ALIGNMENT = 8

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, with at most PIECE bytes of it on the way to the disk at any time.

    Tensors may be on a GPU; at most a piece is copied at once. Raises OSError if the disk does not take it.
    """
    if any(each.dtype not in _TYPES for each in tensors.values()):
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
        return
    with Path(path).open("wb", buffering=0) as file:
        waiting = 0
        for piece in _pieces(tensors, metadata):
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]
            waiting += len(piece)
            if waiting >= PIECE:
                os.fdatasync(file.fileno())
                waiting = 0
        os.fdatasync(file.fileno())


def _pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[bytes | memoryview]:
    # The widest first: so each begins at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    yield _header(ordered, metadata)
    for _, tensor in ordered:
        flat = tensor.detach().reshape(-1)
        for part in torch.split(flat, PIECE // flat.element_size()):
            yield part.cpu().contiguous().view(torch.uint8).numpy().data


def _header(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in ordered:
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def piecewise_save_pretrained() -> Iterator[None]:
    """Have transformers' save_pretrained write its weights so; it has no option for who writes them."""
    before = getattr(modeling_utils, _WRITER)
    setattr(modeling_utils, _WRITER, write_tensors)
    try:
        yield
    finally:
        setattr(modeling_utils, _WRITER, before)
