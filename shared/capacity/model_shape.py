"""The size and the family of a model, by the files of its folder. Nothing of the model is loaded."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from tuneloop.shared.errors import EnvironmentRefused

#: Families that scale queries and keys by a norm of their own, whose inputs training keeps too.
_QK_NORMS = ("qwen3", "gemma3", "gemma4", "olmo2", "olmo3")


class ModelShape(NamedTuple):
    """What memory depends on. `weights`: all parameters, a head that is the embeddings counted once.

    `stored_bytes`: the weights as they lie in the folder.
    """

    folder: Path
    family: str
    weights: int
    stored_bytes: int
    layers: int
    width: int
    inner_width: int
    heads: int
    key_value_heads: int
    head_width: int
    vocabulary: int
    tied: bool
    qk_norms: bool
    max_length: int | None
    template: str

    @property
    def head_weights(self) -> int:
        """Parameters of a head of its own, which a critic has none of."""
        return 0 if self.tied else self.vocabulary * self.width

    def cache_bytes(self, bytes_per_number: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.key_value_heads * self.head_width * bytes_per_number

    def activation_bytes(self, bytes_per_number: int) -> int:
        """What one token keeps for the backward pass: the inputs of each layer's matrices, norms and gates.

        Norms are taken in float32 whatever the weights are. In bfloat16 that is 16 D + 8 F and 4 per number of the
        queries, keys, values and outputs; where queries and keys have norms, 6 more. tests/cli/setup compares it with
        what torch keeps.
        """
        size = bytes_per_number
        attention = (self.heads + self.key_value_heads) * self.head_width * 2 * size + 4 * self.heads
        norms = (self.heads + self.key_value_heads) * (self.head_width * (4 + size if size == 2 else 8) + 4)
        widths = (16 if size == 2 else 24) * self.width + 4 * size * self.inner_width
        return self.layers * (widths + attention + 8 + (norms if self.qk_norms else 0))


def read_shape(folder: Path, *, setting: str = "model.model_path") -> ModelShape:
    """The shape of the model in a Hugging Face folder. Raises EnvironmentRefused if there is none."""
    if not folder.is_dir():
        raise EnvironmentRefused(f"{setting}: {folder} is not there; give the folder of a Hugging Face model")
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        raise EnvironmentRefused(
            f"{setting}: {folder} is not a model folder (it has no readable config.json); give the folder of a Hugging"
            " Face model"
        ) from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EnvironmentRefused(f"{setting}: {folder} has no *.safetensors; the weights must be in the folder")
    text = config.get("text_config") or config
    try:
        return _shape(folder, config | text, files)
    except KeyError as error:
        raise EnvironmentRefused(
            f"{setting}: {folder}/config.json does not say {error.args[0]}: what it takes cannot be reckoned"
        ) from None


def _shape(folder: Path, config: dict[str, Any], files: list[Path]) -> ModelShape:
    heads, width, vocabulary = config["num_attention_heads"], config["hidden_size"], config["vocab_size"]
    counts = [_count(file) for file in files]
    tied = bool(config.get("tie_word_embeddings", False))
    head_twice = tied and any(has_head for _, _, has_head in counts)
    weights = sum(number for number, _, _ in counts) - (vocabulary * width if head_twice else 0)
    family = str(config.get("model_type", "unknown"))
    return ModelShape(
        folder=folder,
        family=family,
        weights=weights,
        stored_bytes=sum(size for _, size, _ in counts),
        layers=config["num_hidden_layers"],
        width=width,
        inner_width=config["intermediate_size"],
        heads=heads,
        key_value_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or width // heads,
        vocabulary=vocabulary,
        tied=tied,
        qk_norms=family.startswith(_QK_NORMS),
        max_length=config.get("max_position_embeddings"),
        template=_template(folder),
    )


def _count(file: Path) -> tuple[int, int, bool]:
    """Numbers and bytes of a safetensors file by its header, and whether a head is among them."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size)) if size < 100 << 20 else {}
        tensors = {name: each for name, each in header.items() if name != "__metadata__"}
        numbers = sum(math.prod(each["shape"]) for each in tensors.values())
        stored = sum(each["data_offsets"][1] - each["data_offsets"][0] for each in tensors.values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentRefused(f"model.model_path: {file} cannot be read as safetensors: {error}") from None
    return numbers, stored, "lm_head.weight" in tensors


def _template(folder: Path) -> str:
    """The chat template, empty where there is none."""
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(errors="replace")
    try:
        found = json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template") or ""
    except (OSError, ValueError):
        return ""
    return found if isinstance(found, str) else json.dumps(found)
