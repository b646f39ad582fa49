"""Models by their names on Hugging Face's Hub: looked for in its local cache, never asked of the network."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path

#: `owner/name`, or a name alone; a folder of the cache is `models--owner--name`.
_NAME = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")


def cached_folder(named: Path) -> Path:
    """The whole snapshot of a model that `hf download` has put into the cache; else `named` itself."""
    if os.path.exists(named) or not _NAME.fullmatch(str(named)):
        return named
    repository = _cache() / f"models--{str(named).replace('/', '--')}"
    with suppress(OSError):
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
        if _is_whole(snapshot):
            return snapshot.absolute()
    return named


def download_sentence(named: Path) -> str | None:
    """What to do where there is no model of this name; None if it is no name of the Hub's."""
    if os.path.exists(named) or "/" not in str(named) or not _NAME.fullmatch(str(named)):
        return None
    return (
        f"{named} is no folder here, and {_cache()} has no whole model of that name in safetensors; if"
        f" Hugging Face's Hub has it: hf download {named}"
    )


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{home}/huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(cache)).expanduser()


def _is_whole(folder: Path) -> bool:
    """Whether it has a configuration and weights: all files of them that its index names, if it has one."""
    index = folder / "model.safetensors.index.json"
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        read = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else ()
        files = {*read} or {each.name for each in folder.glob("*.safetensors")}
        return bool(files) and all((folder / each).is_file() for each in ("config.json", *files))
    return False
