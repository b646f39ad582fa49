"""Files of tensors that are brought to disk piece by piece."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.loop.harness.services import make_model
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.snapshot import DiskPriority, write_tensors

pytestmark = pytest.mark.contract


def tensors() -> dict[str, Tensor]:
    """One of each type, odd shapes, and one that does not lie in one piece of memory."""
    torch.manual_seed(0)
    found = {str(each): torch.randint(0, 2, (3, 5)).to(each) for each in snapshot._TYPES}
    transposed = torch.randn(7, 4).T
    return {**found, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "transposed": transposed}


class Disk:
    """Counts the bytes that are written and not yet brought to disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[str, int] = {}
        self.most = 0
        fdatasync = os.fdatasync

        def sync(descriptor: int) -> None:
            name, size = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size
            self.most = max(self.most, size - self.synced.get(name, 0))
            self.synced[name] = size
            fdatasync(descriptor)

        monkeypatch.setattr(snapshot.os, "fdatasync", sync)


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    write_tensors(tensors(), path, {"format": "pt"})
    found = load_file(path)
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_type_that_is_unknown_here_is_written_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "complex.safetensors"
    write_tensors({"a": torch.ones(3, dtype=torch.float8_e4m3fn)}, path)
    assert load_file(path)["a"].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("sizes", [[10_000], [300] * 40, [5_000, 1, 5_000]])
def test_at_most_two_pieces_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(snapshot, "PIECE", 4096)
    disk, path = Disk(monkeypatch), tmp_path / "long.safetensors"
    found = {f"{number}": torch.arange(size, dtype=torch.float32) for number, size in enumerate(sizes)}
    write_tensors(found, path)
    assert all(torch.equal(each, found[name]) for name, each in load_file(path).items())
    assert disk.most < 2 * 4096
    assert disk.synced == {str(path): path.stat().st_size}


def test_every_large_file_of_a_learner_is_written_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model")
    values: dict[str, Any] = {"checkpoint_root_dir": tmp_path, "model": {"model_path": model}}
    learner = snapshot.load(Settings.model_validate(values | {"mode": "train", "trainer": {"device": "cpu"}}), None)
    disk, folder = Disk(monkeypatch), tmp_path / "saved"
    folder.mkdir()
    snapshot.save(learner, folder, base=model)
    large = [path for path in folder.rglob("*.safetensors") if path.name != "value_head.safetensors"]
    assert {path.relative_to(folder).parts[0] for path in large} == {"actor", "critic", "trainer_state"}
    assert {str(path) for path in large} == disk.synced.keys()


def test_what_is_not_urgent_is_written_when_nothing_urgent_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_PATIENCE_S", 60.0)
    priority, path, found = DiskPriority(), tmp_path / "long.safetensors", {"a": torch.zeros(100)}
    writer = threading.Thread(target=write_tensors, args=(found, path), kwargs={"priority": priority})
    with priority.urgent():
        writer.start()
        writer.join(0.2)
        assert path.stat().st_size == 0
    writer.join(60)
    assert load_file(path).keys() == {"a"}


def test_the_urgent_is_waited_for_so_long_before_each_piece_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "PIECE", 4096)
    monkeypatch.setattr(snapshot, "_PATIENCE_S", 0.01)
    path, waited = tmp_path / "long.safetensors", []

    class Noting(DiskPriority):
        def wait(self) -> None:
            waited.append(path.stat().st_size)
            super().wait()

    found = {f"{number}": torch.arange(100, dtype=torch.float32) for number in range(40)}
    priority = Noting()
    with priority.urgent():
        write_tensors(found, path, priority=priority)
    assert load_file(path).keys() == found.keys()
    assert len(waited) == path.stat().st_size // 4096 + 1, "before each tensor would be many times as long"
