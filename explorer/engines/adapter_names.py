"""Names of adapters on an engine, made of their hash: whatever is cached under one is right."""

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
        return _NAMED.sub(lambda _: b'"model":%b' % orjson.dumps(self.public_name), lines)
