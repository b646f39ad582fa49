"""What files of clients hold, on its way to the disk and away from it: streamed, bounded, synced, and swept."""

import asyncio
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import structlog
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.limits import METER_KEY
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.checkpoints import sync_folder
from tuneloop.shared.errors import LedgerUnavailable, RequestRefused, StorageFull
from tuneloop.shared.held_files import new_unlinked
from tuneloop.shared.ledger.files import FILES
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: Bytes of the largest file, and of the largest part of an upload.
MAX_FILE_BYTES, MAX_PART_BYTES = 512 << 20, 64 << 20

#: Bytes that are left on the disk for what the service itself has to keep.
RESERVED_BYTES = 1 << 30

#: Bytes of the fields of a form beside its file, and of what is written at once.
_FIELD_BYTES, _WRITE_BYTES = 64 << 10, 1 << 20

#: How often bytes are swept, and how long those may lie there that no row names: a request may be writing them.
SWEEP_S, UNNAMED_S = 60.0, 3600.0


class ReceivedForm(NamedTuple):
    """A form whose file is on the disk: its other fields, and what the file is called and has."""

    fields: dict[str, str]
    filename: str
    size: int
    sha256: str


class _Form:
    """The callbacks of a multipart parser: `data` is what came of the file and is not written yet."""

    def __init__(self, field: str) -> None:
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self.data, self.is_over = bytearray(), False
        self._field, self._name, self._header, self._value = field, "", b"", b""
        self._is_file, self._room = False, _FIELD_BYTES

    def callbacks(self) -> dict[str, Any]:
        names = ("part_begin", "header_field", "header_value", "header_end", "headers_finished", "part_data", "end")
        return {f"on_{name}": getattr(self, name) for name in names}

    def part_begin(self) -> None:
        """A field begins."""
        self._name, self._is_file, self._header, self._value = "", False, b"", b""

    def header_field(self, data: bytes, start: int, end: int) -> None:
        """Some of a header's name."""
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        """Some of a header's value."""
        self._value += data[start:end]

    def header_end(self) -> None:
        """A header is complete."""
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode(errors="replace")
            if self._name == self._field and self.filename is not None:
                raise RequestRefused(f"{self._field} is there twice", code="invalid_value", param=self._field)
            if self._name == self._field and b"filename" in options:
                self._is_file, self.filename = True, options[b"filename"].decode(errors="replace")
        self._header = self._value = b""

    def headers_finished(self) -> None:
        """What a field holds begins."""
        if not self._is_file:
            self._room -= len(self._name)
            self.fields[self._name] = b""

    def part_data(self, data: bytes, start: int, end: int) -> None:
        """Some of what a field holds."""
        if self._is_file:
            self.data += data[start:end]
            return
        self._room -= end - start
        if self._room < 0:
            raise RequestRefused(f"the fields beside {self._field} are too large", status=413, code="body_too_large")
        self.fields[self._name] += data[start:end]

    def end(self) -> None:
        """The form is complete."""
        self.is_over = True


def too_large(most: int) -> RequestRefused:
    """The refusal of a file that has more bytes than it may."""
    return RequestRefused(
        f"the file is too large: it may have {most} bytes ({most >> 20} MB)",
        status=413,
        code="file_too_large",
        param="file",
    )


@contextmanager
def new_file(path: Path, size: int) -> Iterator[BinaryIO]:
    """A file to write about so many bytes into; none is left if the block fails, which also adds its row after `sync`.

    Raises RequestRefused for a full disk, StorageFull for another error of it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free - size < RESERVED_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = new_unlinked(path)
        try:
            with file:
                yield file
        except LedgerUnavailable:
            raise  # the row may be there; if it is not, the bytes are swept
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            log.error("file_not_kept", reason=error.strerror)
            raise StorageFull(f"the file cannot be kept: {error.strerror}") from None
        reason = "the service's disk has no room for the file"
        raise RequestRefused(reason, status=507, code="storage_full") from None


async def sync(file: BinaryIO, path: Path) -> None:
    """Bring a file's bytes and its name to disk. Raises OSError."""

    def sync_both() -> None:
        file.flush()
        os.fsync(file.fileno())
        sync_folder(path.parent)

    await asyncio.to_thread(sync_both)


async def receive_form(request: Request, file: BinaryIO, *, field: str, most: int) -> ReceivedForm:
    """Write the file of a multipart body while it comes, at most so many bytes. Raises RequestRefused, OSError."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise RequestRefused(f"send multipart/form-data with the field {field}", code="invalid_content_type")
    request.scope[METER_KEY].begin_stream()
    form, size, digest, more = _Form(field), 0, hashlib.sha256(), True

    def write(data: bytes) -> None:
        digest.update(data)
        file.write(data)

    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks())  # type: ignore[arg-type]
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise RequestRefused("the client disconnected", status=499, code="client_left")
            more = message.get("more_body", False)
            parser.write(message.get("body", b""))
            if size + len(form.data) > most:
                raise too_large(most)
            if form.data and (len(form.data) >= _WRITE_BYTES or not more):
                data, form.data = bytes(form.data), bytearray()
                size += len(data)
                await asyncio.to_thread(write, data)
    except FormParserError as error:
        raise RequestRefused(f"the body is no multipart/form-data: {error}", code="invalid_multipart") from None
    if not form.is_over:
        raise RequestRefused("the body ends before its last boundary", code="invalid_multipart")
    if form.filename is None:
        raise RequestRefused(f"{field} is missing, or sent without a filename", code="missing_required_parameter")
    fields = {name: value.decode(errors="replace") for name, value in form.fields.items()}
    return ReceivedForm(fields, form.filename, size, digest.hexdigest())


def join(parts: Sequence[Path], file: BinaryIO) -> tuple[str, str]:
    """Write the parts into a file, one behind the other; their SHA-256 and MD5. Raises OSError."""
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    for part in parts:
        with part.open("rb") as source:
            while data := source.read(_WRITE_BYTES):
                file.write(data)
                sha256.update(data)
                md5.update(data)
    return sha256.hexdigest(), md5.hexdigest()


async def sweep_files(settings: Settings, ledger: Ledger, metrics: Metrics) -> None:
    """Remove, while this explorer leads, the bytes that no row needs any more."""

    async def look() -> None:
        if await asyncio.to_thread(ledger.explorers.lead, settings.explorer_name) is not None:
            await asyncio.to_thread(partial(sweep, settings.job_dir / FILES, ledger))

    await every(SWEEP_S, look, task="files", metrics=metrics)


def sweep(folder: Path, ledger: Ledger) -> list[str]:
    """Remove the bytes that no row needs, and those that no row has named for a while; their names."""
    with suppress(OSError):
        found = [each for each in folder.iterdir() if each.is_file()]
        known, removed, before = ledger.files.find_needed([each.name for each in found]), [], time.time() - UNNAMED_S
        for each in found:
            with suppress(FileNotFoundError):
                if not known.get(each.name, each.stat().st_mtime > before):
                    each.unlink()
                    removed.append(each.name)
        if removed:
            log.info("files_removed", count=len(removed))
        return removed
    return []
