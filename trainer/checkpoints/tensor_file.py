"""Writes safetensors files so that nobody waits long for the disk beside them, and tells their sha256.

What a process writes lies in memory until the kernel, or somebody's fsync, brings it to the disk; and an fsync on a
journaling file system waits for what others have written before. A checkpoint written at the speed of memory keeps
requests, which are on disk before they are acknowledged, waiting for seconds. So it is brought to disk piece by piece.
A thread hashes each piece while it is written, and several files are written at once.

What nobody waits for, critic and optimisers, has the disk while no version is being written (`DiskPriority`).
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import modeling_utils as _modeling_utils

from tuneloop.shared.checkpoints.sealing import sha256_of

#: Bytes that are written before they are brought to disk. A disk of 500 MB/s takes a thirtieth of a second for them.
PIECE = 16 << 20

#: Files that are written at once; each has a thread that hashes it besides.
_WRITERS = 4

#: How long a piece waits for what is more urgent.
_PATIENCE_S = 1.0

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


class DiskPriority:
    """Has pieces of files wait while something more urgent is written, but each for `_PATIENCE_S` at most.

    So they are written at 16 MB a second and file at the least, however long the urgent takes.
    """

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """What is written within the block goes first; there is one such block at a time."""
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    def wait(self) -> None:
        """Before a piece that is not urgent."""
        self._free.wait(_PATIENCE_S)


class TensorFiles:
    """Safetensors files on their way to the disk, by `write` or by save_pretrained within `saving`.

    The tensors must stay as they are until `digests` has been asked, or the block has ended. With a `priority` they are
    not urgent.
    """

    def __init__(self, priority: DiskPriority | None = None) -> None:
        self._priority = priority
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="tensors")
        self._written: dict[Path, Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def write(
        self, tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Begin to write a file."""
        work = self._pool.submit(write_tensors, tensors, path, metadata, priority=self._priority)
        self._written[Path(path)] = work

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Have save_pretrained write its weights so, in this thread."""
        _here.files = self
        try:
            yield
        finally:
            _here.files = None

    def digests(self) -> dict[Path, str]:
        """The sha256 of each file, once all are written. Raises OSError or SafetensorError if one could not be."""
        return {path: each.result() for path, each in self._written.items()}


def write_tensors(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    priority: DiskPriority | None = None,
) -> str:
    """Write a safetensors file, with at most PIECE bytes of it on the way to the disk at any time; its sha256.

    Tensors may be on a GPU; at most a piece is copied at once. Raises OSError if the disk does not take it.
    """
    if any(each.dtype not in _TYPES for each in tensors.values()):
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
        return sha256_of(Path(path))
    with Path(path).open("wb", buffering=0) as file, ThreadPoolExecutor(1, thread_name_prefix="sha256") as hasher:
        waiting, digest = 0, hashlib.sha256()
        hashed: Future[None] | None = None
        for piece in _pieces(tensors, metadata):
            if priority is not None and not waiting:
                priority.wait()
            if hashed is not None:
                hashed.result()
            hashed = hasher.submit(digest.update, piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]
            waiting += len(piece)
            if waiting >= PIECE:
                os.fdatasync(file.fileno())
                waiting = 0
        os.fdatasync(file.fileno())
    return digest.hexdigest()


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


_here = threading.local()
_transformers: Any = _modeling_utils
_save_file = _transformers.safe_save_file


def _write(tensors: Mapping[str, Tensor], path: str, metadata: Mapping[str, str] | None = None) -> None:
    """What save_pretrained calls in transformers 5.5 to 5.19, which has no option for who writes."""
    files: TensorFiles | None = getattr(_here, "files", None)
    if files is None:
        _save_file(tensors, path, metadata=metadata)
    else:
        files.write(tensors, path, metadata)


_transformers.safe_save_file = _write
