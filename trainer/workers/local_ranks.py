"""Ray Train's workers of one machine find each other by a file: by Ray's own way a port would be open to everybody."""

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend


class LocalTorchConfig(TorchConfig):  # type: ignore[misc]
    """A process group of workers that are all on this machine."""

    @property
    def backend_cls(self) -> type["_FileBackend"]:
        """What starts and ends it."""
        return _FileBackend


class _FileBackend(_TorchBackend):  # type: ignore[misc]
    # For as long as the group: its members make further groups of it by the same file.
    _folder: "tempfile.TemporaryDirectory[str] | None" = None

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Let all workers join, and raise what kept one of them from it."""
        self._forget()  # Those before were killed, perhaps.
        self._folder = tempfile.TemporaryDirectory(prefix="tuneloop-")
        size, rendezvous = len(worker_group), str(Path(self._folder.name) / "rendezvous")
        where = (backend_config.backend, rendezvous, size, backend_config.timeout_s)
        ray.get([worker_group.execute_single_async(rank, _join, *where, rank) for rank in range(size)])

    def on_shutdown(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Let all leave."""
        super().on_shutdown(worker_group, backend_config)
        self._forget()

    def _forget(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _join(backend: str, rendezvous: str, size: int, timeout_s: int, rank: int) -> None:
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
