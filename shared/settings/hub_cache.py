"""Models by their names on Hugging Face's Hub: looked for in its local cache, never asked of the network."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

#: `owner/name`, or a name alone; a folder of the cache is `models--owner--name`.
_NAME = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
_REPOSITORY = re.compile(r"models--(?:.+--)?(.+)")


def cached_folder(named: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """The snapshot of a model that `hf download` has put into the cache; `named` itself if there is a folder, or none.

    A snapshot that lacks its configuration or weights is none.
    """
    if named.exists() or not _NAME.fullmatch(str(named)):
        return named
    repository = _cache(environment) / f"models--{str(named).replace('/', '--')}"
    with suppress(OSError):
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
        if _is_whole(snapshot):
            return snapshot.absolute()
    return named


def download_sentence(named: Path, environment: Mapping[str, str] = os.environ) -> str | None:
    """What to do where there is no model of this name; None if it is no name of the Hub's."""
    if named.exists() or "/" not in str(named) or not _NAME.fullmatch(str(named)):
        return None
    return (
        f"{named} is no folder here, and {_cache(environment)} has no whole model of that name in safetensors; if"
        f" Hugging Face's Hub has it: hf download {named}"
    )


def name_of_model(folder: Path) -> str:
    """What a model is called: the name of its folder, or of its repository if the folder is the cache's.

    >>> name_of_model(Path("/cache/models--Qwen--Qwen3-0.6B/snapshots/c1899d")), name_of_model(Path("/models/mine"))
    ('Qwen3-0.6B', 'mine')
    """
    repository = _REPOSITORY.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return repository[1] if repository else folder.name


def _cache(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps what it has downloaded."""
    home = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{home}/huggingface"
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(cache)).expanduser()


def _is_whole(folder: Path) -> bool:
    """Whether it has a configuration and weights: all files of them that its index names, if it has one."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        files = set(index["weight_map"].values())
    except FileNotFoundError:
        files = {each.name for each in folder.glob("*.safetensors")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(files) and all((folder / each).is_file() for each in ("config.json", *files))
