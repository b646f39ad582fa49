"""Bad checkpoints of every kind that was thought of, the same in every run, each with what its rejection must name.

Those that are `sealed` were spoilt before the trainer vouched for them: the manifest is right about what is wrong. Left
out are sealed weights that are wrong and finite: they are another valid model, which only the probe tells from ours.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.explorer.checkpoints import CONFIG, tensors, write_model

Spoil = Callable[[Path], object]

WEIGHTS = "model.safetensors"

#: A configuration as models have it.
FULL_CONFIG: dict[str, Any] = CONFIG | {
    "model_type": "qwen3",
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "sliding_window": None,
    "max_position_embeddings": 128,
    "eos_token_id": 7,
    "attention_bias": False,
    "layer_types": ["full_attention"],
    "auto_map": {"AutoModel": "modeling.Model"},
    "dtype": "float32",
}

_COMPANIONS = {
    "tokenizer.json": '{"model": {"vocab": {"a": 0}}}',
    "tokenizer_config.json": '{"eos_token": "<end>"}',
    "generation_config.json": '{"eos_token_id": 7, "transformers_version": "5.0"}',
    "merges.txt": "a b\n",
    "chat_template.jinja": "{{ messages }}",
    "modeling.py": "class Model: ...\n",
}
_CHANGED: dict[str, Any] = {
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "sliding_window": 16,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "quantization_config": {"quant_method": "fp8"},
    "auto_map": {"AutoModel": "other.Model"},
    "trust_remote_code": True,
    "layer_types": ["sliding_attention"],
    "attention_bias": True,
    "eos_token_id": 6,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 16,
    "dtype": "int8",
    "torch_dtype": "float8_e4m3fn",
}
_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_NOT_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@dataclass(frozen=True)
class Corruption:
    """`spoil` is given the actor's folder before it is sealed, or the published folder; `reason` is an expression."""

    name: str
    spoil: Spoil
    reason: str
    sealed: bool
    dtype: str = "float32"


def write_full_model(folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder with a tokenizer, templates and code."""
    write_model(folder, seed)
    (folder / "config.json").write_text(json.dumps(FULL_CONFIG))
    for name, text in _COMPANIONS.items():
        (folder / name).write_text(text)
    return folder


def corruptions() -> list[Corruption]:
    """All of them."""
    return [
        *_after_sealing(),
        *_folders(),
        *_headers(),
        *_not_finite(),
        *_configs(),
        *_files(),
        *_tensors(),
        *_indices(),
    ]


# What happens to a good checkpoint on a disk.


def _after_sealing() -> Iterator[Corruption]:
    chance = random.Random(0)
    manifest = "manifest"
    for name in (f"actor/{WEIGHTS}", "actor/config.json", "actor/tokenizer.json", "manifest.json"):
        reason = manifest if name == "manifest.json" else Path(name).name
        for share in sorted({0.0, 0.999, *(chance.random() for _ in range(8))}):
            yield Corruption(f"{name} cut at {share:.3f}", partial(_cut, name, share), reason, sealed=False)
        for place in sorted(chance.random() for _ in range(12)):
            bit = chance.randrange(8)
            yield Corruption(
                f"{name} bit {bit} flipped at {place:.3f}", partial(_flip, name, place, bit), reason, sealed=False
            )
        yield Corruption(f"{name} deleted", partial(_delete, name), reason, sealed=False)
        yield (
            Corruption(f"{name} a link", partial(_link, name), reason, sealed=False)
            if reason != manifest
            else (Corruption(f"{name} a folder", partial(_folder, name), reason, sealed=False))
        )
        yield Corruption(f"{name} longer", partial(_longer, name), reason, sealed=False)
        yield Corruption(f"{name} with a hole", partial(_hole, name), reason, sealed=False)
    other = f"actor/{WEIGHTS}", "actor/config.json"
    yield Corruption("files swapped", lambda path: _swap(path / other[0], path / other[1]), "config.json", sealed=False)
    yield Corruption("weights of another version", _other_weights, WEIGHTS, sealed=False)


def _cut(name: str, share: float, path: Path) -> None:
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: int(len(data) * share)])


def _flip(name: str, place: float, bit: int, path: Path) -> None:
    data = bytearray((path / name).read_bytes())
    data[int(len(data) * place)] ^= 1 << bit
    (path / name).write_bytes(data)


def _delete(name: str, path: Path) -> None:
    (path / name).unlink()


def _link(name: str, path: Path) -> None:
    elsewhere = path.parent / "elsewhere"
    (path / name).rename(elsewhere)
    (path / name).symlink_to(elsewhere)


def _folder(name: str, path: Path) -> None:
    (path / name).unlink()
    (path / name).mkdir()


def _longer(name: str, path: Path) -> None:
    (path / name).write_bytes((path / name).read_bytes() + b"\0")


def _hole(name: str, path: Path) -> None:
    """As a crashed file system leaves it: the right length, and nothing in the second half."""
    data = (path / name).read_bytes()
    half = len(data) // 2
    (path / name).write_bytes(data[:half] + bytes(len(data) - half))


def _swap(one: Path, other: Path) -> None:
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)


def _other_weights(path: Path) -> None:
    save_file(tensors(99), path / "actor" / WEIGHTS, metadata={"format": "pt"})


def _folders() -> Iterator[Corruption]:
    def other_manifest(path: Path) -> None:
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"version": 1', '"version": 2'))

    yield Corruption("no folder", shutil.rmtree, "manifest", sealed=False)
    yield Corruption("no actor", lambda path: shutil.rmtree(path / "actor"), "actor", sealed=False)
    yield Corruption("manifest of another version", other_manifest, "manifest", sealed=False)
    yield Corruption(
        "another file", lambda path: (path / "actor" / "x.safetensors").write_bytes(b""), "x.safetensors", sealed=False
    )
    yield Corruption(
        "a link to nowhere", lambda path: (path / "actor" / "x").symlink_to("/nowhere"), "actor/x", sealed=False
    )


# What a trainer spoilt and vouched for.


def _headers() -> Iterator[Corruption]:
    """A bit of the header, or of its length."""
    chance = random.Random(1)
    for place, bit in sorted({(chance.random(), chance.randrange(8)) for _ in range(80)}):
        yield Corruption(
            f"header bit {bit} at {place:.3f}", partial(_flip_header, place, bit), _SOMETHING_OF_WEIGHTS, sealed=True
        )
    for length in (0, 1, 7, 1 << 20, 100_000_001, (1 << 63) + 5):
        yield Corruption(f"header of {length} bytes", partial(_claim, length), f"{WEIGHTS}: its header", sealed=True)
    yield Corruption("huge header", _huge_header, f"{WEIGHTS}: its header", sealed=True)


#: A header says names, shapes, types and places; which of them is wrong depends on the bit.
_SOMETHING_OF_WEIGHTS = (
    r"model\.safetensors: its header|\d tensors are missing, .*(weight|norm|lm_head)|has shape|is of type"
)


def _flip_header(place: float, bit: int, actor: Path) -> None:
    data = bytearray((actor / WEIGHTS).read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    data[int(end * place)] ^= 1 << bit
    (actor / WEIGHTS).write_bytes(data)


def _claim(length: int, actor: Path) -> None:
    data = (actor / WEIGHTS).read_bytes()
    (actor / WEIGHTS).write_bytes(struct.pack("<Q", length) + data[8:])


def _huge_header(actor: Path) -> None:
    with (actor / WEIGHTS).open("r+b") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)


def _not_finite() -> Iterator[Corruption]:
    for kind, dtype in _TYPES.items():
        for tensor in tensors():
            for reply, value in _NOT_NUMBERS.items():
                for place in (1, -1):
                    yield Corruption(
                        f"{reply} in {kind} {tensor} at {place}",
                        partial(_poison, kind, tensor, place, value),
                        f"{tensor} in {WEIGHTS} holds NaN or infinity",
                        sealed=True,
                        dtype=dtype,
                    )


def _poison(kind: str, tensor: str, place: int, value: float, actor: Path) -> None:
    found = tensors(1)
    found[tensor].flat[place] = value
    header, data = {}, b""
    for name, numbers in found.items():
        answer = _bytes(kind, numbers)
        header[name] = {
            "dtype": kind,
            "shape": list(numbers.shape),
            "data_offsets": [len(data), len(data) + len(answer)],
        }
        data += answer
    reply = json.dumps(header).encode()
    (actor / WEIGHTS).write_bytes(struct.pack("<Q", len(reply)) + reply + data)


def _bytes(kind: str, numbers: np.ndarray) -> bytes:
    if kind == "BF16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return numbers.astype({"F16": np.float16, "F32": np.float32, "F64": np.float64}[kind]).tobytes()


def _configs() -> Iterator[Corruption]:
    for key, value in _CHANGED.items():
        yield _config_with(f"config: {key} is {value}", FULL_CONFIG | {key: value}, key)
    for key in sorted(FULL_CONFIG.keys() - {"dtype", "rope_scaling", "sliding_window"}):
        without = {other: value for other, value in FULL_CONFIG.items() if other != key}
        yield _config_with(f"config: no {key}", without, key)
    for text in ("", "{", "[]", "null", "[" * 100_000, "\0"):
        yield Corruption(
            f"config: {text[:9]!r}", partial(_write, "config.json", text.encode()), r"config\.json", sealed=True
        )
    yield Corruption("no config", lambda actor: (actor / "config.json").unlink(), r"config\.json", sealed=True)


def _config_with(name: str, config: dict[str, Any], key: str) -> Corruption:
    text = json.dumps(config).encode()
    return Corruption(name, partial(_write, "config.json", text), f"config.json: {key} is", sealed=True)


def _write(name: str, text: bytes, actor: Path) -> None:
    (actor / name).write_bytes(text)


def _files() -> Iterator[Corruption]:
    """Of those beside the weights and the configuration."""
    for name in _COMPANIONS:
        yield Corruption(f"{name} is other", partial(_write, name, b'{"other": 1}'), f"{name} .*differ", sealed=True)
        yield Corruption(f"{name} is empty", partial(_write, name, b""), f"{name} .*differ", sealed=True)
        yield Corruption(f"{name} is missing", partial(_delete, name), f"{name} is missing", sealed=True)
    for name in ("adapter_config.json", "tokenizer.model", "vocab.txt", "processor_config.json"):
        yield Corruption(f"{name} came", partial(_write, name, b"{}"), f"{name} .*has none", sealed=True)
    for suffix in ("bin", "pt", "pth", "pkl", "ckpt"):
        yield Corruption(f"a .{suffix}", partial(_write, f"m.{suffix}", b"\x80"), f"m.{suffix} may hold", sealed=True)


def _tensors() -> Iterator[Corruption]:
    for name, numbers in tensors(1).items():
        yield _weights_with(f"no {name}", {name: None}, f"1 tensors are missing, {name}")
        yield _weights_with(f"{name} renamed", {name: None, f"{name}s": numbers}, f"missing, {name}")
        yield _weights_with(f"{name} shorter", {name: numbers[:-1]}, f"{name} has shape")
        yield _weights_with(f"{name} flat", {name: numbers[None].reshape(1, -1)}, f"{name} has shape")
        yield _weights_with(f"{name} empty", {name: numbers[:0]}, f"{name} has shape")
        for kind in (np.float16, np.float64, np.int8, np.int32, np.uint8, np.bool_):
            changed = {name: numbers.astype(kind)}
            yield _weights_with(f"{name} of {np.dtype(kind)}", changed, f"{name} is of type")
    yield _weights_with("a tensor more", {"model.extra.weight": np.zeros(4, np.float32)}, "model.extra.weight")
    yield Corruption("no weights", partial(_delete, WEIGHTS), "holds no tensors", sealed=True)
    yield Corruption(
        "weights twice", lambda actor: shutil.copy(actor / WEIGHTS, actor / "z.safetensors"), "two files", sealed=True
    )


def _weights_with(name: str, but: dict[str, Any], reason: str) -> Corruption:
    found = {key: value for key, value in (tensors(1) | but).items() if value is not None}
    return Corruption(
        name, lambda actor: save_file(found, actor / WEIGHTS, metadata={"format": "pt"}), reason, sealed=True
    )


def _indices() -> Iterator[Corruption]:
    """An engine leaves aside what the index does not name."""
    right = dict.fromkeys(tensors(), WEIGHTS)
    for name, text in {
        "an index without one": {"weight_map": {key: WEIGHTS for key in right if key != "lm_head.weight"}},
        "an index with one more": {"weight_map": right | {"model.extra": WEIGHTS}},
        "an index of another file": {"weight_map": right | {"lm_head.weight": "other.safetensors"}},
        "an index of a file outside": {"weight_map": right | {"lm_head.weight": "../model.safetensors"}},
        "an index of numbers": {"weight_map": right | {"lm_head.weight": 1}},
        "an empty index": {"weight_map": {}},
        "an index without a map": {},
    }.items():
        reply = json.dumps(text).encode()
        yield Corruption(
            name,
            partial(_write, f"{WEIGHTS}.index.json", reply),
            r"index\.json|other\.safetensors|no tensors",
            sealed=True,
        )
