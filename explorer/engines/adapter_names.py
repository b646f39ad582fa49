"""Names of adapters: an engine calls one by a name of ours, clients call it as they would call all weights.

A name is made of what the adapter is: whatever an engine has kept under it, such as prefixes of prompts, is right.
"""

import hashlib
import re
from pathlib import Path

import msgspec
import orjson

from tuneloop.shared.checkpoint import ACTOR, ADAPTER_CONFIG, read_manifest
from tuneloop.shared.errors import CheckpointRejected

_PREFIX = "tuneloop-adapter-"
_DIGITS = 32
#: Any adapter of ours: what an engine has kept may be of one before this.
_NAMED = re.compile(rb'"model":"%b[^"]*"' % _PREFIX.encode())


def is_adapter(actor: Path) -> bool:
    """Whether a version's folder holds no more than an adapter."""
    return (actor / ADAPTER_CONFIG).exists()


def name_of(actor: Path) -> str:
    """What an engine calls the adapter in `actor`. Raises CheckpointRejected if its manifest cannot be read."""
    manifest = read_manifest(actor.parent)
    files = sorted((file.path, file.sha256) for file in manifest.files if file.path.startswith(f"{ACTOR}/"))
    if not files:
        raise CheckpointRejected(f"{actor.parent.name}: its manifest names no file of an adapter")
    digest = hashlib.sha256(repr(files).encode()).hexdigest()
    return f"{_PREFIX}{manifest.version}-{digest[:_DIGITS]}"


def without_adapters(models: bytes) -> bytes:
    """An engine's list of models as it would be if it had all weights; the same bytes if it has no adapter."""
    if _PREFIX.encode() not in models:
        return models
    told = orjson.loads(models)
    return orjson.dumps(told | {"data": [each for each in told["data"] if not each["id"].startswith(_PREFIX)]})


class ModelRenaming(msgspec.Struct, frozen=True):
    """What clients call what an engine answers with, and which adapter of its own that is."""

    public: str
    adapter: str

    def asked(self, body: bytes) -> bytes | None:
        """A request as it is for the adapter; None if the body is none, or names something else."""
        try:
            said = orjson.loads(body)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(said, dict) or said.get("model") not in (None, "", self.public):
            return None
        return orjson.dumps(said | {"model": self.adapter})

    def told(self, lines: bytes) -> bytes:
        """Whole lines of a reply as clients get them. In a text of it the quotes would stand behind backslashes."""
        return _NAMED.sub(lambda _: b'"model":%b' % orjson.dumps(self.public), lines)
