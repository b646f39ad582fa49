"""The size and the family of a model, by the files of its folder. Nothing of the model is loaded."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.hub_cache import download_sentence


class ModelShape(NamedTuple):
    """What memory depends on. `weights`: all parameters, a head that is the embeddings counted once."""

    folder: Path
    family: str
    weights: int
    layers: int
    width: int
    inner_width: int
    heads: int
    key_value_heads: int
    head_width: int
    vocabulary: int
    tied: bool
    max_length: int | None
    template: str

    @property
    def head_weights(self) -> int:
        """Parameters of a head of its own, which a critic has none of."""
        return 0 if self.tied else self.vocabulary * self.width

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        width, inner = self.width, self.inner_width
        queries, keys = self.heads * self.head_width, self.key_value_heads * self.head_width
        attention = {"q_proj": (width, queries), "k_proj": (width, keys), "v_proj": (width, keys)}
        inside = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
        return attention | {"o_proj": (queries, width)} | inside

    def cache_bytes(self, size: int) -> int:
        """Keys and values of one token, in numbers of `size` bytes."""
        return 2 * self.layers * self.key_value_heads * self.head_width * size

    def activation_bytes(self, size: int) -> int:
        """What one token keeps for the backward pass: the inputs of each layer's matrices, norms and gates."""
        attention = 5 * (self.heads + self.key_value_heads) * self.head_width
        return self.layers * size * (8 * self.width + 4 * self.inner_width + attention)


def read_shape(folder: Path, *, setting: str = "model.model_path") -> ModelShape:
    """The shape of the model in a Hugging Face folder. Raises EnvironmentRefused if there is none."""
    if not folder.is_dir():
        sentence = f"{folder} is not there; give the folder of a Hugging Face model"
        raise EnvironmentRefused(f"{setting}: {download_sentence(folder) or sentence}")
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        raise EnvironmentRefused(
            f"{setting}: {folder} is not a model folder (it has no readable config.json); give the folder of a Hugging"
            " Face model"
        ) from None
    config |= config.get("text_config") or {}
    weights, has_head = 0, False
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size)) if size < 100 << 20 else {}
            header.pop("__metadata__", None)
            weights += sum(math.prod(each["shape"]) for each in header.values())
            has_head |= "lm_head.weight" in header
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentRefused(f"{setting}: {file} cannot be read as safetensors: {error}") from None
    if not weights:
        raise EnvironmentRefused(f"{setting}: {folder} has no *.safetensors; the weights must be in the folder")
    beside, template = folder / "chat_template.jinja", ""
    with suppress(OSError, ValueError):
        of_tokenizer = json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template") or ""
        template = of_tokenizer if isinstance(of_tokenizer, str) else json.dumps(of_tokenizer)
    try:
        heads, width, vocabulary = config["num_attention_heads"], config["hidden_size"], config["vocab_size"]
        tied = bool(config.get("tie_word_embeddings", False))
        return ModelShape(
            folder=folder,
            family=str(config.get("model_type", "unknown")),
            weights=weights - (vocabulary * width if tied and has_head else 0),
            layers=config["num_hidden_layers"],
            width=width,
            inner_width=config["intermediate_size"],
            heads=heads,
            key_value_heads=config.get("num_key_value_heads") or heads,
            head_width=config.get("head_dim") or width // heads,
            vocabulary=vocabulary,
            tied=tied,
            max_length=config.get("max_position_embeddings"),
            template=beside.read_text(errors="replace") if beside.is_file() else template,
        )
    except KeyError as error:
        raise EnvironmentRefused(
            f"{setting}: {folder}/config.json does not say {error.args[0]}: its memory cannot be estimated"
        ) from None
