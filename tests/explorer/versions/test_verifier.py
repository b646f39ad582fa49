import json
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.explorer.checkpoints import CONFIG, publish, seal, tensors, write_model
from tuneloop.explorer.versions import safetensors
from tuneloop.explorer.versions.verifier import verify
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.errors import CheckpointRejected

pytestmark = pytest.mark.contract

Spoil = Callable[[Path], None]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "job")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base")


def check(path: Path, sha256: str, base: Path, version: int = 1) -> None:
    verify(path, manifest_sha256=sha256, version=version, base=base)


def sealed(store: CheckpointStore, spoil: Spoil, *, dtype: str = "float32") -> tuple[Path, str]:
    """A checkpoint that its trainer spoiled before vouching for it."""
    staging = store.stage(1)
    spoil(write_model(staging / "actor", seed=1))
    return seal(store, staging, 1, dtype=dtype)


def test_a_good_checkpoint_is_accepted(store: CheckpointStore, base: Path) -> None:
    check(*publish(store, 1), base)


def test_any_byte_that_changed_is_noticed(store: CheckpointStore, base: Path) -> None:
    path, sha256 = publish(store, 1)
    seeded = random.Random(0)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) == 3
    for _ in range(300):
        file = seeded.choice(files)
        good = file.read_bytes()
        bad = bytearray(good)
        bad[seeded.randrange(len(bad))] ^= 1 << seeded.randrange(8)
        file.write_bytes(bad)
        with pytest.raises(CheckpointRejected):
            check(path, sha256, base)
        file.write_bytes(good)
    check(path, sha256, base)


def test_any_file_cut_short_is_noticed(store: CheckpointStore, base: Path) -> None:
    path, sha256 = publish(store, 1)
    for file in [file for file in path.rglob("*") if file.is_file()]:
        good = file.read_bytes()
        for length in {0, 1, 7, 8, 9, len(good) // 2, len(good) - 1}:
            file.write_bytes(good[:length])
            with pytest.raises(CheckpointRejected):
                check(path, sha256, base)
        file.write_bytes(good + b"x")
        with pytest.raises(CheckpointRejected):
            check(path, sha256, base)
        file.unlink()
        with pytest.raises(CheckpointRejected):
            check(path, sha256, base)
        file.write_bytes(good)


@pytest.mark.parametrize("what", ["missing", "no manifest", "extra", "link", "half copied", "other version", "file"])
def test_a_folder_that_is_not_the_published_one_is_rejected(store: CheckpointStore, base: Path, what: str) -> None:
    path, sha256 = publish(store, 1)
    weights = path / "actor" / "model.safetensors"
    if what == "missing":
        shutil.rmtree(path)
    elif what == "no manifest":
        (path / "manifest.json").unlink()
    elif what == "extra":
        shutil.copy(weights, path / "actor" / "more.safetensors")
    elif what == "link":
        weights.rename(path.parent / "elsewhere")
        weights.symlink_to(path.parent / "elsewhere")
    elif what == "half copied":
        weights.unlink()
    elif what == "other version":
        other, _ = publish(store, 2)
        shutil.rmtree(path)
        other.rename(path)
    else:
        shutil.rmtree(path)
        path.write_bytes(b"")
    with pytest.raises(CheckpointRejected):
        check(path, sha256, base)


def weights(folder: Path, **but: Any) -> None:
    """Write the right tensors but for some; None leaves one out."""
    found: dict[str, Any] = tensors(1) | {name.replace("__", "."): value for name, value in but.items()}
    save_file({name: value for name, value in found.items() if value is not None}, folder / "model.safetensors")


def raw(folder: Path, header: bytes, data: bytes = b"", *, length: int | None = None) -> None:
    size = len(header) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + header + data)


def entries(**but: Any) -> bytes:
    """A header whose entry for the norm differs from the right one."""
    places, start = {}, 0
    for name, value in tensors(1).items():
        places[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [start, start + value.nbytes]}
        start += value.nbytes
    places["model.norm.weight"] |= but
    return json.dumps(places).encode()


def config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)


DATA = b"".join(value.tobytes() for value in tensors(1).values())
HEAD = np.zeros((8, 4), np.float32)
SPOILT: dict[str, Spoil] = {
    "a tensor is missing": lambda actor: weights(actor, lm_head__weight=None),
    "a tensor too many": lambda actor: weights(actor, model__extra__weight=HEAD),
    "another name": lambda actor: weights(actor, lm_head__weight=None, head__weight=HEAD),
    "another shape": lambda actor: weights(actor, lm_head__weight=np.zeros((4, 8), np.float32)),
    "another length": lambda actor: weights(actor, model__norm__weight=np.zeros(5, np.float32)),
    "whole numbers": lambda actor: weights(actor, model__norm__weight=np.zeros(4, np.int32)),
    "truths": lambda actor: weights(actor, model__norm__weight=np.zeros(4, np.bool_)),
    "no weights": lambda actor: (actor / "model.safetensors").unlink(),
    "an empty file": lambda actor: (actor / "model.safetensors").write_bytes(b""),
    "a short file": lambda actor: (actor / "model.safetensors").write_bytes(b"abc"),
    "no tensors": lambda actor: raw(actor, b"{}"),
    "a header longer than the file": lambda actor: raw(actor, entries(), DATA, length=1 << 20),
    "a header of 2^63 bytes": lambda actor: raw(actor, entries(), DATA, length=1 << 63),
    "a header cut short": lambda actor: raw(actor, entries(), DATA, length=20),
    "a header that is no JSON": lambda actor: raw(actor, b"\xff" * 40),
    "a header that is a list": lambda actor: raw(actor, b"[]"),
    "a header that is a number": lambda actor: raw(actor, b"5"),
    "a deep header": lambda actor: raw(actor, b"[" * 100_000),
    "entries that are none": lambda actor: raw(actor, b'{"a": 5, "b": null}'),
    "no offsets": lambda actor: raw(actor, b'{"a": {"dtype": "F32", "shape": []}}'),
    "offsets beyond the file": lambda actor: raw(actor, entries(data_offsets=[128, 1 << 40]), DATA),
    "offsets backwards": lambda actor: raw(actor, entries(data_offsets=[144, 128]), DATA),
    "offsets below zero": lambda actor: raw(actor, entries(data_offsets=[-16, 0]), DATA),
    "offsets that overlap": lambda actor: raw(actor, entries(data_offsets=[0, 16]), DATA),
    "offsets that are no numbers": lambda actor: raw(actor, entries(data_offsets=["0", "16"]), DATA),
    "offsets that are fractions": lambda actor: raw(actor, entries(data_offsets=[128.0, 144.0]), DATA),
    "three offsets": lambda actor: raw(actor, entries(data_offsets=[0, 1, 2]), DATA),
    "fewer bytes than the shape": lambda actor: raw(actor, entries(data_offsets=[128, 136]), DATA),
    "a type of other size": lambda actor: raw(actor, entries(dtype="F64"), DATA),
    "a type that is none": lambda actor: raw(actor, entries(dtype="X9"), DATA),
    "a type that is a list": lambda actor: raw(actor, entries(dtype=["F32"]), DATA),
    "a shape that is a number": lambda actor: raw(actor, entries(shape=4), DATA),
    "a shape of texts": lambda actor: raw(actor, entries(shape=["4"]), DATA),
    "bytes after the tensors": lambda actor: raw(actor, entries(), DATA + b"x"),
    "the same tensor twice": lambda actor: shutil.copy(actor / "model.safetensors", actor / "a.safetensors") and None,
    "a pickle": lambda actor: (actor / "pytorch_model.bin").write_bytes(b"\x80\x04.") and None,
    "no config": lambda actor: (actor / "config.json").unlink(),
    "a config that is no JSON": lambda actor: config(actor, "{"),
    "a config that is a list": lambda actor: config(actor, "[]"),
    "a deep config": lambda actor: config(actor, "[" * 100_000),
    "a config of other size": lambda actor: config(actor, json.dumps(CONFIG | {"hidden_size": 8})),
    "a config of another model": lambda actor: config(actor, json.dumps(CONFIG | {"architectures": ["Other"]})),
    "a config with tied heads": lambda actor: config(actor, json.dumps(CONFIG | {"tie_word_embeddings": True})),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_the_trainer_spoilt_is_rejected(store: CheckpointStore, base: Path, what: str) -> None:
    with pytest.raises(CheckpointRejected):
        check(*sealed(store, SPOILT[what]), base)


def numbers(kind: str, value: float) -> bytes:
    """Eight by four numbers, one of them `value`."""
    found = np.ones(32, np.float32)
    found[17] = value
    if kind == "BF16":
        return (found.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return found.astype({"F16": np.float16, "F32": np.float32, "F64": np.float64}[kind]).tobytes()


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32", "F64"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1.0])
def test_numbers_that_are_none_are_rejected(store: CheckpointStore, base: Path, kind: str, value: float) -> None:
    data = numbers(kind, value)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    header = {
        name: {"dtype": kind, "shape": [8, 4], "data_offsets": [at * len(data), (at + 1) * len(data)]}
        for at, name in enumerate(names)
    }
    end = 2 * len(data)
    header["model.norm.weight"] = {"dtype": "F32", "shape": [4], "data_offsets": [end, end + 16]}
    dtype = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}[kind]
    header_bytes = json.dumps(header).encode()
    path, sha256 = sealed(store, lambda actor: raw(actor, header_bytes, data * 2 + b"\0" * 16), dtype=dtype)
    if value == 1.0:
        check(path, sha256, base)
        return
    with pytest.raises(CheckpointRejected, match="NaN or infinity"):
        check(path, sha256, base)


def test_any_header_is_read_or_rejected(store: CheckpointStore, base: Path) -> None:
    """The file is what the trainer vouches for, but its header was flipped at random."""
    seeded = random.Random(1)
    good = (write_model(store.stage(1) / "actor", seed=1) / "model.safetensors").read_bytes()
    length = int.from_bytes(good[:8], "little")
    rejected = 0
    for _ in range(100):
        bad = bytearray(good)
        for _ in range(seeded.randint(1, 3)):
            bad[seeded.randrange(8 + length)] ^= 1 << seeded.randrange(8)

        def spoil(actor: Path, bad: bytes = bytes(bad)) -> None:
            (actor / "model.safetensors").write_bytes(bad)

        try:
            check(*sealed(store, spoil), base)
        except CheckpointRejected:
            rejected += 1
    assert rejected > 80


def test_a_tied_head_may_be_stored_or_not(store: CheckpointStore, base: Path) -> None:
    tied = json.dumps(CONFIG | {"tie_word_embeddings": True})
    config(base, tied)

    def without_head(actor: Path) -> None:
        config(actor, tied)
        weights(actor, lm_head__weight=None)

    check(*sealed(store, without_head), base)


def test_it_says_why_on_standard_output(store: CheckpointStore, base: Path) -> None:
    path, sha256 = publish(store, 1)
    command = [sys.executable, "-m", "tuneloop.explorer.versions.verifier", str(path), sha256, "1", str(base)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert found == safetensors.fingerprints_of(safetensors.tensors(path / "actor"), tied=False)
    (path / "actor" / "config.json").write_text("{}")
    said = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (1, "")
    assert "config.json" in said.stdout


def test_a_large_checkpoint_is_read_by_several_processes_alike(store: CheckpointStore, base: Path) -> None:
    run = (
        "import sys; from tuneloop.explorer.versions import safetensors, verifier; safetensors._LARGE = 0;"
        " safetensors._READERS = 3; sys.exit(verifier.main())"
    )

    def read(path: Path, sha256: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", run, str(path), sha256, "1", str(base)]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    path, sha256 = publish(store, 1)
    said = read(path, sha256)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == safetensors.fingerprints_of(safetensors.tensors(path / "actor"), tied=False)
    other = CheckpointStore(path.parent / "other")
    spoilt = read(*sealed(other, lambda actor: weights(actor, lm_head__weight=np.full((8, 4), np.nan, np.float32))))
    assert (spoilt.returncode, spoilt.stderr) == (1, "")
    assert "lm_head.weight in model.safetensors holds NaN or infinity" in spoilt.stdout
