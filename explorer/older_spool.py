"""Takes over what a release before the outbox left on disk: frames of records in numbered folders.

{folder}/{slot}/*.seg, *.torn, *.kept    frames: u32 length | u32 crc32 | payload, little-endian
"""

import re
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import structlog

from tuneloop.explorer.recorder import FILE_BYTES
from tuneloop.runner.outbox import Outbox, lock

log = structlog.get_logger()

_HEAD = struct.Struct("<II")

#: How a record begins. Behind damage, where a length cannot be trusted, the next one is found by it.
_RECORD = re.compile(rb"(?:[\x80-\x8f]|\xde..)\xa4type\xa8(?:exchange|feedback)", re.DOTALL)

#: Records that are brought to disk at once.
_GROUP = 256


def convert(folders: Iterable[Path], outbox_dir: Path) -> None:
    """Append the slots below these folders to an outbox, then delete them. Raises OSError."""
    slots = [path for folder in folders for path in folder.glob("*") if path.name.isdigit() and not path.is_symlink()]
    if slots:
        with closing(Outbox(outbox_dir, FILE_BYTES)) as outbox:
            _convert_slots(sorted(slots), outbox)


def _convert_slots(slots: Iterable[Path], outbox: Outbox) -> None:
    for slot in slots:
        with (slot / "lock").open("ab") as held:
            if not lock(held.fileno()):
                log.error(
                    "older_spool_in_use", slot=str(slot), sentence="end the older release, and start this one again"
                )
                continue
            for path in sorted(each for each in slot.iterdir() if each.suffix in {".kept", ".seg", ".torn"}):
                payloads = list(_payloads(path))
                for first in range(0, len(payloads), _GROUP):
                    outbox.append(payloads[first : first + _GROUP])
                log.info("older_spool_converted", file=str(path), records=len(payloads))
            shutil.rmtree(slot)


def _payloads(path: Path) -> Iterator[bytes]:
    data, offset = path.read_bytes(), 0
    while offset < len(data):
        length, checksum = _HEAD.unpack(data[offset : offset + _HEAD.size].ljust(_HEAD.size, b"\0"))
        payload = data[offset + _HEAD.size : offset + _HEAD.size + length]
        if 0 < length == len(payload) and zlib.crc32(payload) == checksum:
            yield payload
            offset += _HEAD.size + length
        else:
            found = _RECORD.search(data, offset + _HEAD.size + 1)
            following = len(data) if found is None else found.start() - _HEAD.size
            log.error("older_spool_damaged", file=str(path), offset=offset, bytes=following - offset)
            offset = following
