"""OpenAI's files and uploads, each of one tenant: streamed and synced to the disk, and swept at last."""

import asyncio
import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tuneloop.explorer.auth import caller_of
from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.http.bodies import optional_text, read_object, wrong_type
from tuneloop.explorer.http.lists import page_response, parse_page_query
from tuneloop.explorer.limits import METER_KEY
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.checkpoints import sync_folder
from tuneloop.shared.errors import FileRefused, LedgerUnavailable, RequestRefused, StorageFull
from tuneloop.shared.experience import MAX_NAME
from tuneloop.shared.held_files import new_unlinked
from tuneloop.shared.ledger.files import FILES, Files, StoredFile, Upload
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.job_requests import PURPOSE
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

PURPOSES = (PURPOSE,)

#: The files of a page, at most and if nothing is said.
MAX_LIMIT = 10_000

#: The seconds for which a file may be kept that expires.
_SHORTEST_S, _LONGEST_S = 3600, 30 * 86400

_MAX_BODY_BYTES = 256 << 10

#: Bytes of a form that are not its file's.
_FORM_BYTES = 1 << 20

#: Parts of an upload. Together they may have twice its bytes, since one may come again.
_MAX_PARTS = 1000


def add_routes(app: FastAPI, settings: Settings, ledger: Ledger) -> None:
    routes = FileRoutes(settings.job_dir / FILES, ledger.files)
    app.post("/v1/files")(routes.upload_file)
    app.get("/v1/files")(routes.list_files)
    app.get("/v1/files/{file_id}")(routes.retrieve)
    app.get("/v1/files/{file_id}/content")(routes.content)
    app.delete("/v1/files/{file_id}")(routes.delete)
    app.post("/v1/uploads")(routes.begin_upload)
    app.post("/v1/uploads/{upload_id}/parts")(routes.add_part)
    app.post("/v1/uploads/{upload_id}/complete")(routes.complete)
    app.post("/v1/uploads/{upload_id}/cancel")(routes.cancel)


class FileRoutes:
    def __init__(self, folder: Path, files: Files) -> None:
        self._folder, self._files = folder, files

    async def _find(self, request: Request, file_id: str) -> StoredFile:
        found = await asyncio.to_thread(self._files.find, file_id, caller_of(request.scope).tenant)
        return found or _no_such("file", file_id)

    async def _find_upload(self, request: Request, upload_id: str) -> Upload:
        found = await asyncio.to_thread(self._files.find_upload, upload_id, caller_of(request.scope).tenant)
        return found or _no_such("upload", upload_id)

    async def upload_file(self, request: Request) -> Response:
        caller, length = caller_of(request.scope), int(request.headers.get("content-length") or 0)
        if length > MAX_FILE_BYTES + _FORM_BYTES:
            raise too_large(MAX_FILE_BYTES)
        file_id = f"file-{secrets.token_hex(12)}"
        with new_file(self._folder / file_id, length) as file:
            form = await receive_form(request, file, field="file", most=MAX_FILE_BYTES)
            fields = form.fields
            if unknown := sorted(fields.keys() - {"purpose", "expires_after[anchor]", "expires_after[seconds]"}):
                raise RequestRefused(f"unknown field {unknown[0][:64]!r}", code="unknown_parameter", param=unknown[0])
            if not form.size:
                raise RequestRefused("the file is empty", code="empty_file", param="file")
            policy = {
                name: int(value) if value.isascii() and value.isdigit() and len(value) < 10 else value
                for name in ("anchor", "seconds")
                if (value := fields.get(f"expires_after[{name}]")) is not None
            }
            draft = StoredFile(
                id=file_id,
                tenant=caller.tenant,
                purpose=_purpose(fields.get("purpose")),
                filename=_filename(form.filename, "file"),
                bytes=form.size,
                sha256=form.sha256,
                created_at=0.0,
                created_by=caller.name,
                expires_at=_seconds_kept(policy or None),
            )
            await sync(file, self._folder / file_id)
            kept = await asyncio.to_thread(self._files.add, draft)
        return JSONResponse(_file(kept))

    async def list_files(self, request: Request) -> Response:
        query = parse_page_query(request.query_params, default=MAX_LIMIT, most=MAX_LIMIT, order="desc")
        tenant, purpose = caller_of(request.scope).tenant, request.query_params.get("purpose")
        look = partial(self._files.page, tenant, purpose=purpose, **query._asdict())
        try:
            page = await asyncio.to_thread(look)
        except FileRefused as error:
            raise RequestRefused(f"after: {error}", code="invalid_value", param="after") from None
        return page_response([_file(each) for each in page.files], more=page.more)

    async def retrieve(self, file_id: str, request: Request) -> Response:
        return JSONResponse(_file(await self._find(request, file_id)))

    async def content(self, file_id: str, request: Request) -> Response:
        found = await self._find(request, file_id)
        if not (self._folder / found.id).is_file():
            raise RequestRefused("what the file held is not on this disk", status=404, code="not_found")
        return FileResponse(self._folder / found.id, media_type="application/octet-stream", filename=found.filename)

    async def delete(self, file_id: str, request: Request) -> Response:
        """Delete a file; a job that learns from it goes on."""
        found = await self._find(request, file_id)
        await asyncio.to_thread(self._files.delete, found.id)
        return JSONResponse({"id": found.id, "object": "file", "deleted": True})

    async def begin_upload(self, request: Request) -> Response:
        caller, body = caller_of(request.scope), await read_object(request, max_bytes=_MAX_BODY_BYTES)
        size = body.get("bytes")
        if type(size) is not int:
            raise wrong_type("bytes", "an integer")
        if size > MAX_FILE_BYTES:
            raise too_large(MAX_FILE_BYTES)
        if size < 1:
            raise RequestRefused("bytes must be at least 1", code="out_of_range", param="bytes")
        kept_s = _seconds_kept(body.get("expires_after"))
        upload = Upload(
            id=f"upload_{secrets.token_hex(12)}",
            tenant=caller.tenant,
            purpose=_purpose(body.get("purpose")),
            filename=_filename(optional_text(body, "filename"), "filename"),
            mime_type=_filename(optional_text(body, "mime_type"), "mime_type"),
            bytes=size,
            status="pending",
            parts={},
            created_at=0.0,
            created_by=caller.name,
            expires_at=0.0,
            keeps_s=None if kept_s is None else int(kept_s),
        )
        return JSONResponse(_upload(await asyncio.to_thread(self._files.begin_upload, upload)))

    async def add_part(self, upload_id: str, request: Request) -> Response:
        upload, length = await self._find_upload(request, upload_id), int(request.headers.get("content-length") or 0)
        room = min(MAX_PART_BYTES, 2 * upload.bytes - sum(upload.parts.values()))
        if length > MAX_PART_BYTES + _FORM_BYTES or len(upload.parts) >= _MAX_PARTS:
            raise too_large(MAX_PART_BYTES)
        part_id = f"part_{secrets.token_hex(12)}"
        with new_file(self._folder / part_id, length) as file:
            form = await receive_form(request, file, field="data", most=room)
            await sync(file, self._folder / part_id)
            changed = await _change(self._files, upload, part=(part_id, form.size))
        created = {"created_at": int(changed.created_at), "upload_id": upload.id}
        return JSONResponse({"id": part_id, "object": "upload.part", **created})

    async def complete(self, upload_id: str, request: Request) -> Response:
        upload = await self._find_upload(request, upload_id)
        body = await read_object(request, max_bytes=_MAX_BODY_BYTES)
        part_ids, wanted = body.get("part_ids"), optional_text(body, "md5")
        if not isinstance(part_ids, list) or not all(isinstance(each, str) for each in part_ids):
            raise wrong_type("part_ids", "a list of the ids of parts")
        if upload.status == "completed":  # the answer before may have been lost
            return JSONResponse(_upload(upload, await self._find(request, upload.file or "")))
        if upload.status != "pending":
            raise RequestRefused(f"the upload is {upload.status}", code=f"upload_{upload.status}")
        if unknown := [each for each in part_ids if each not in upload.parts]:
            raise RequestRefused(f"the upload has no part {unknown[0][:64]!r}", code="invalid_value", param="part_ids")
        size = sum(upload.parts[each] for each in part_ids)
        if len({*part_ids}) < len(part_ids) or size != upload.bytes:
            raise RequestRefused(
                f"the parts have {size} bytes, and the upload was to have {upload.bytes}",
                code="invalid_value",
                param="part_ids",
            )
        file_id = f"file-{secrets.token_hex(12)}"
        with new_file(self._folder / file_id, size) as file:
            sha256, md5 = await asyncio.to_thread(join, [self._folder / each for each in part_ids], file)
            if wanted is not None and wanted.lower() != md5:
                raise RequestRefused(f"the parts have the MD5 {md5}", code="checksum_mismatch", param="md5")
            draft = StoredFile(
                id=file_id,
                tenant=upload.tenant,
                purpose=upload.purpose,
                filename=upload.filename,
                bytes=size,
                sha256=sha256,
                created_at=0.0,
                created_by=upload.created_by,
                expires_at=upload.keeps_s,
            )
            await sync(file, self._folder / file_id)
            done = await _change(self._files, upload, file=draft)
        return JSONResponse(_upload(done, await self._find(request, file_id)))

    async def cancel(self, upload_id: str, request: Request) -> Response:
        return JSONResponse(_upload(await _change(self._files, await self._find_upload(request, upload_id))))


async def _change(files: Files, upload: Upload, **to: Any) -> Upload:
    try:
        return await asyncio.to_thread(partial(files.change_upload, upload.id, **to))
    except FileRefused as error:
        raise RequestRefused(str(error), code=f"upload_{upload.status}") from None


def _purpose(value: object) -> str:
    if value not in PURPOSES:
        there = ", ".join(PURPOSES)
        raise RequestRefused(f"purpose must be one of: {there}", code="invalid_value", param="purpose")
    return str(value)


def _filename(value: str | None, param: str) -> str:
    if not value:
        raise RequestRefused(f"{param} has no name", code="missing_required_parameter", param=param)
    if len(value) > MAX_NAME or not value.isprintable():
        raise RequestRefused(f"{param}: a name has at most {MAX_NAME} letters", code="invalid_value", param=param)
    return value


def _seconds_kept(policy: object) -> float | None:
    """For how long a file is to be kept; None: until it is deleted. Raises RequestRefused."""
    if policy is None:
        return None
    seconds = policy.get("seconds") if isinstance(policy, Mapping) else None
    if not isinstance(policy, Mapping) or policy.get("anchor") != "created_at" or type(seconds) is not int:
        wanted = "an anchor, created_at, and seconds"
        raise RequestRefused(f"expires_after must have {wanted}", code="invalid_value", param="expires_after")
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        reason = f"expires_after.seconds must lie between {_SHORTEST_S} and {_LONGEST_S}"
        raise RequestRefused(reason, code="out_of_range", param="expires_after.seconds")
    return float(seconds)


def _no_such(kind: str, found_by: str) -> NoReturn:
    raise RequestRefused(f"no such {kind}: {found_by[:64]!r}", status=404, code="not_found", param="id")


def _file(file: StoredFile) -> dict[str, Any]:
    times = {name: None if (at := getattr(file, name)) is None else int(at) for name in ("created_at", "expires_at")}
    said = {name: getattr(file, name) for name in ("id", "bytes", "filename", "purpose")}
    return {"object": "file", **said, **times, "status": "processed", "status_details": None}


def _upload(upload: Upload, file: StoredFile | None = None) -> dict[str, Any]:
    said = {name: getattr(upload, name) for name in ("id", "bytes", "filename", "purpose", "status")}
    times = {"created_at": int(upload.created_at), "expires_at": int(upload.expires_at)}
    return {"object": "upload", **said, **times, "file": file and _file(file)}


class ReceivedForm(NamedTuple):
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
        names = ("part_begin", "header_field", "header_value", "header_end", "part_data", "end")
        return {f"on_{name}": getattr(self, name) for name in names}

    def part_begin(self) -> None:
        self._name, self._is_file, self._header, self._value = "", False, b"", b""

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode(errors="replace")
            if self._name == self._field and self.filename is not None:
                raise RequestRefused(f"{self._field} is there twice", code="invalid_value", param=self._field)
            if self._name == self._field and b"filename" in options:
                self._is_file, self.filename = True, options[b"filename"].decode(errors="replace")
            self._room -= len(self._name)
        self._header = self._value = b""

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.data += data[start:end]
            return
        self._room -= end - start
        if self._room < 0:
            raise RequestRefused(f"the fields beside {self._field} are too large", status=413, code="body_too_large")
        self.fields[self._name] = self.fields.get(self._name, b"") + data[start:end]

    def end(self) -> None:
        self.is_over = True


def too_large(most: int) -> RequestRefused:
    return RequestRefused(
        f"the file is too large: it may have {most} bytes ({most >> 20} MB)",
        status=413,
        code="file_too_large",
        param="file",
    )


@contextmanager
def new_file(path: Path, size: int) -> Iterator[BinaryIO]:
    """A file to write about `size` bytes into; none is left if the block fails. Raises RequestRefused, StorageFull."""
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
