"""Names of LoRA adapters: on an engine each has a name of its own, clients call all by the one served model name.

A name is made of a hash of the adapter: whatever an engine has cached under it, such as prompt prefixes, is right.
"""

import hashlib
import re
from pathlib import Path

import msgspec
import orjson

from tuneloop.shared.checkpoints import ACTOR, ADAPTER_CONFIG, read_manifest
from tuneloop.shared.errors import CheckpointRejected

_PREFIX = "tuneloop-adapter-"
_DIGITS = 32
#: Any adapter of ours: an older reply may still be from the adapter before.
_NAMED = re.compile(rb'"model":"%b[^"]*"' % _PREFIX.encode())


def is_adapter(actor: Path) -> bool:
    """Whether a version's folder holds no more than an adapter."""
    return (actor / ADAPTER_CONFIG).exists()


def adapter_name_of(actor: Path) -> str:
    """The name of the adapter in `actor` on an engine. Raises CheckpointRejected if its manifest cannot be read."""
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
    body = orjson.loads(models)
    return orjson.dumps(body | {"data": [each for each in body["data"] if not each["id"].startswith(_PREFIX)]})


class ModelRenaming(msgspec.Struct, frozen=True):
    """The name that clients use for a model, and that of the adapter on the engine."""

    public_name: str
    adapter_name: str

    def rename_request(self, body: bytes) -> bytes | None:
        """A request as the engine must get it; None if the body is not JSON, or names another model."""
        try:
            request = orjson.loads(body)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(request, dict) or request.get("model") not in (None, "", self.public_name):
            return None
        return orjson.dumps(request | {"model": self.adapter_name})

    def rename_reply(self, lines: bytes) -> bytes:
        """Whole lines of a reply as clients get them. Inside a text of it the quotes would be escaped."""
        return _NAMED.sub(lambda _: b'"model":%b' % orjson.dumps(self.public_name), lines)
