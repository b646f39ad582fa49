"""An adapter is served only if it is one, of this base model."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.doubles.verifier import PastVerifier, WarmVerifier, start_warm_verifier
from tests.explorer.adapters import halves, seal, write_adapter, write_base
from tests.explorer.versions.test_corruptions import version_at
from tuneloop.explorer.versions import loading
from tuneloop.explorer.versions.loading import Verifier, verify_in_process
from tuneloop.explorer.versions.safetensors import adapter_fingerprints_of, fingerprints_of, tensors
from tuneloop.explorer.versions.verifier import verify
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.errors import CheckpointRejected

UP = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"


def _verified(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    base, store = write_base(tmp_path / "base"), CheckpointStore(tmp_path / "job")
    spoil(write_adapter(store.stage(1) / "actor", base))
    path, sha256 = seal(store, tmp_path / "job" / ".staging-1", 1)
    verify(path, manifest_sha256=sha256, version=1, base=base)


def _config(**but: object) -> Callable[[Path], None]:
    def spoil(actor: Path) -> None:
        config = json.loads((actor / "adapter_config.json").read_text())
        (actor / "adapter_config.json").write_text(json.dumps(config | but))

    return spoil


def _tensors(**but: np.ndarray | None) -> Callable[[Path], None]:
    def spoil(actor: Path) -> None:
        found = {name: each for name, each in (halves() | but).items() if each is not None}
        save_file(found, actor / "adapter_model.safetensors")

    return spoil


def _no_layer(actor: Path) -> None:
    save_file(
        {name: each for name, each in halves().items() if "up_proj" not in name}, actor / "adapter_model.safetensors"
    )


def test_a_good_adapter_passes(tmp_path: Path) -> None:
    _verified(tmp_path, lambda actor: None)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_config(r=0), "r is 0"),
        (_config(r=3), r"q_proj.* has shape|up_proj.* has shape"),
        (_config(r="2"), "r is '2'"),
        (_config(lora_alpha=float("inf")), "lora_alpha is inf"),
        (_config(target_modules=[]), "target_modules"),
        (_config(target_modules=["q_proj"]), "up_proj is not a layer"),
        (_config(peft_type="IA3"), "peft_type is 'IA3'"),
        (_config(use_dora=True), "use_dora is True"),
        (_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (_config(rank_pattern={"q_proj": 4}), "rank_pattern"),
        (_config(base_model_name_or_path="/elsewhere"), "it belongs to '/elsewhere'"),
        (lambda actor: (actor / "adapter_config.json").write_text("[]"), "is not a JSON object"),
        (lambda actor: (actor / "adapter_config.json").write_text("{"), "cannot be read"),
        (lambda actor: (actor / "adapter_config.json").unlink(), "adapter_config.json is missing or extra"),
        (lambda actor: (actor / "model.safetensors").write_bytes(b""), "model.safetensors is missing or extra"),
        (lambda actor: (actor / "adapter_model.bin").write_bytes(b""), "may hold a pickle"),
        (lambda actor: (actor / "adapter_model.safetensors").write_bytes(b"\0" * 9), "adapter_model.safetensors"),
        (_tensors(**{UP: None}), "has no counterpart"),
        (_no_layer, "1 layers have no adapter, .*up_proj"),
        (_tensors(**{UP: np.zeros((8, 3), np.float32)}), r"up_proj.lora_B.weight has shape \(8, 3\), not \(8, 2\)"),
        (_tensors(**{UP: np.zeros((8, 2), np.int8)}), "is of type I8"),
        (_tensors(**{UP: np.full((8, 2), np.nan, np.float32)}), "holds NaN or infinity"),
        (_tensors(**{"base_model.model.lm_head.weight": np.zeros((8, 4), np.float32)}), "not part of an adapter"),
    ],
)
def test_anything_else_is_refused_with_the_reason(tmp_path: Path, spoil: Callable[[Path], None], reason: str) -> None:
    with pytest.raises(CheckpointRejected, match=reason):
        _verified(tmp_path, spoil)


def test_a_base_of_another_shape_is_refused(tmp_path: Path) -> None:
    base, store = write_base(tmp_path / "base"), CheckpointStore(tmp_path / "job")
    write_adapter(store.stage(1) / "actor", base)
    path, sha256 = seal(store, tmp_path / "job" / ".staging-1", 1)
    save_file({"model.norm.weight": np.ones(4, np.float32)}, base / "model.safetensors")
    with pytest.raises(CheckpointRejected, match="is not a layer of the base model"):
        verify(path, manifest_sha256=sha256, version=1, base=base)


async def test_the_base_model_is_read_again_only_when_its_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, store, read, start = write_base(tmp_path / "base"), CheckpointStore(tmp_path / "job"), [], start_warm_verifier

    async def counted(*arguments: str) -> WarmVerifier | PastVerifier:
        read.append(arguments[2])
        return await start(*arguments)

    monkeypatch.setattr(loading, "start_verifier", counted)
    for number in (1, 2, 3):
        write_adapter(store.stage(number) / "actor", base, seed=number)
        path, sha256 = seal(store, tmp_path / "job" / f".staging-{number}", number)
        if number == 3:
            write_base(base, seed=1)
        version = version_at(path, sha256)._replace(version=number)
        probe = await verify_in_process(version, Verifier(base, tmp_path / "job"))
        below = fingerprints_of(tensors(base), tied=False)["float32"]
        above = adapter_fingerprints_of(tensors(path / "actor"), scale=2.0)["float32"]
        assert probe.fingerprints["float32"] == {**below, **above}
    assert read == ["1", "0", "2", "3", "0"]
