"""Loads tokenizers, and finds the tokens that end a reply."""

import json
from functools import cache
from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings


def tokenizer_of(
    settings: Settings, folder: Path | None = None, setting: str = "model.model_path"
) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, by default the base model's. Raises EnvironmentRefused with the setting's name."""
    return _load(folder or settings.model.model_path, settings.model.trust_remote_code, setting)


def ends_of(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a reply: the tokenizer's, then those of generation_config.json and config.json.

    The first one ends replies that the model did not write: chat models' end of turn, while generation_config.json
    often names the end of a document too.
    """
    found = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            found += _named_ends(folder / name)
    if not found:
        raise EnvironmentRefused(
            f"model.model_path: {folder} names no token that ends a reply; write eos_token_id into config.json"
        )
    return list(dict.fromkeys(found))


def ends_in_engines(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens at which vLLM ends a reply: the tokenizer's, and generation_config.json's, otherwise config.json's."""
    found = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            return [*found, *_named_ends(folder / name)]
    return found


def _named_ends(file: Path) -> list[int]:
    named = json.loads(file.read_bytes()).get("eos_token_id")
    return named if isinstance(named, list) else [] if named is None else [named]


@cache
def _load(folder: Path, trust_remote_code: bool, setting: str) -> PreTrainedTokenizerBase:
    try:
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentRefused(f"{setting}: its tokenizer cannot be loaded: {reason}") from error
    return cast(PreTrainedTokenizerBase, found)
