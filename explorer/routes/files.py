"""OpenAI's files and uploads: what fine-tuning jobs learn from, each file of one tenant alone."""

import asyncio
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from tuneloop.explorer.auth import caller_of
from tuneloop.explorer.finetuning.stored_bytes import (
    MAX_FILE_BYTES,
    MAX_PART_BYTES,
    join,
    new_file,
    receive_form,
    sync,
    too_large,
)
from tuneloop.explorer.http.bodies import optional_text, read_object, wrong_type
from tuneloop.shared.errors import FileRefused, RequestRefused
from tuneloop.shared.experience import MAX_NAME
from tuneloop.shared.ledger.files import FILES, Files, StoredFile, Upload
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.job_requests import PURPOSE
from tuneloop.shared.settings.settings import Settings

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
    """The routes. They raise RequestRefused."""

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
        query = request.query_params
        limit, order = query.get("limit", str(MAX_LIMIT)), query.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and 1 <= int(limit) <= MAX_LIMIT):
            raise RequestRefused(f"limit must be an integer from 1 to {MAX_LIMIT}", code="out_of_range", param="limit")
        if order not in {"asc", "desc"}:
            raise RequestRefused("order must be asc or desc", code="invalid_value", param="order")
        way: Literal["asc", "desc"] = "asc" if order == "asc" else "desc"
        tenant, purpose, after = caller_of(request.scope).tenant, query.get("purpose"), query.get("after")
        look = partial(self._files.page, tenant, purpose=purpose, after=after, order=way, limit=int(limit))
        try:
            page = await asyncio.to_thread(look)
        except FileRefused as error:
            raise RequestRefused(f"after: {error}", code="invalid_value", param="after") from None
        data = [_file(each) for each in page.files]
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return JSONResponse({"object": "list", "data": data, **ends, "has_more": page.more})

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
    """OpenAI's file object."""
    times = {name: None if (at := getattr(file, name)) is None else int(at) for name in ("created_at", "expires_at")}
    said = {name: getattr(file, name) for name in ("id", "bytes", "filename", "purpose")}
    return {"object": "file", **said, **times, "status": "processed", "status_details": None}


def _upload(upload: Upload, file: StoredFile | None = None) -> dict[str, Any]:
    """OpenAI's upload object."""
    said = {name: getattr(upload, name) for name in ("id", "bytes", "filename", "purpose", "status")}
    times = {"created_at": int(upload.created_at), "expires_at": int(upload.expires_at)}
    return {"object": "upload", **said, **times, "file": file and _file(file)}
