"""Stores rows of clients' files; the contents are in the job folder below FILES, by id.

A multipart upload is an upload until it is complete. A sweep removes bytes without a row. Bytes of a deleted or expired
file stay until the jobs that train on it end.
"""

from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, and_, insert, or_, select, true, tuple_, update

from tuneloop.shared.errors import FileRefused
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.storage.database import LedgerPart, find, portions
from tuneloop.shared.ledger.storage.job_schema import files, jobs, uploads
from tuneloop.shared.ledger.storage.schema import experiences

FILES = "files"

#: The seconds in which an upload must be completed.
UPLOAD_S = 3600.0

#: What is not committed yet, and why some of it is dropped.
_WAITING, _TWICE = (State.RECORDED, State.REWARDED), "another explorer had the same sample of the job"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `files`. Times are seconds since 1970."""

    id: str
    tenant: str
    purpose: str
    filename: str
    bytes: int
    sha256: str
    created_at: float
    created_by: str
    expires_at: float | None = None
    deleted_at: float | None = None


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `uploads`; `parts`: bytes by id; `keeps_s`: how long its file is kept, None: until deleted."""

    id: str
    tenant: str
    purpose: str
    filename: str
    mime_type: str
    bytes: int
    status: str
    parts: dict[str, int]
    created_at: float
    created_by: str
    expires_at: float
    keeps_s: int | None = None
    file: str | None = None


class FilePage(NamedTuple):
    files: list[StoredFile]
    more: bool


class PromptSample(NamedTuple):
    task_id: str
    run_id: str
    msg_id: str
    text: str
    tool_calls: bytes | None
    completion_tokens: int
    reward: float | None
    state: State
    trained_version: int | None


class Files(LedgerPart):
    """Keeps, lists and deletes files, and takes uploads. A file that has expired is there no more."""

    def add(self, file: StoredFile) -> StoredFile:
        """Keep a file that is on the disk. Its `created_at` is the ledger's, and `expires_at` counts from there."""
        with self._write() as connection:
            kept = self._date(file)
            connection.execute(insert(files).values(msgspec.structs.asdict(kept)))
        return kept

    def find(self, file_id: str, tenant: str | None = None, *, deleted: bool = False) -> StoredFile | None:
        """That file, of a tenant or, with None, of any; None if there is none."""
        chosen = select(files).where(files.c.id == file_id, true() if deleted else self._live())
        rows = self._read(chosen if tenant is None else chosen.where(files.c.tenant == tenant))
        return StoredFile(**rows[0]._mapping) if rows else None

    def page(
        self, tenant: str, *, purpose: str | None, after: str | None, order: Literal["asc", "desc"], limit: int
    ) -> FilePage:
        """A tenant's files by age, those behind `after`. Raises FileRefused where it is none; a deleted one is one."""
        place = tuple_(files.c.created_at, files.c.id)
        chosen = select(files).where(files.c.tenant == tenant, self._live())
        if purpose is not None:
            chosen = chosen.where(files.c.purpose == purpose)
        if after is not None:
            found = self._read(
                select(files.c.created_at, files.c.id).where(files.c.tenant == tenant, files.c.id == after)
            )
            if not found:
                raise FileRefused(f"nothing in this list has the id {after[:64]!r}")
            chosen = chosen.where(place > tuple(found[0]) if order == "asc" else place < tuple(found[0]))
        columns = [files.c.created_at, files.c.id]
        ordered = chosen.order_by(*(each if order == "asc" else each.desc() for each in columns))
        rows = [StoredFile(**row._mapping) for row in self._read(ordered.limit(limit + 1))]
        return FilePage(rows[:limit], len(rows) > limit)

    def set_digest(self, file_id: str, sha256: str) -> None:
        with self._write() as connection:
            connection.execute(update(files).where(files.c.id == file_id).values(sha256=sha256))

    def delete(self, file_id: str) -> None:
        with self._write() as connection:
            connection.execute(update(files).where(files.c.id == file_id).values(deleted_at=self._clock()))

    def begin_upload(self, upload: Upload) -> Upload:
        now = self._clock()
        begun = msgspec.structs.replace(upload, created_at=now, expires_at=now + UPLOAD_S)
        with self._write() as connection:
            connection.execute(insert(uploads).values(msgspec.structs.asdict(begun) | {"parts": "{}"}))
        return begun

    def find_upload(self, upload_id: str, tenant: str) -> Upload | None:
        """That upload of a tenant; one whose time is over has the status `expired`."""
        rows = self._read(select(uploads).where(uploads.c.id == upload_id, uploads.c.tenant == tenant))
        return self._upload_of(rows[0]) if rows else None

    def change_upload(
        self, upload_id: str, *, part: tuple[str, int] | None = None, file: StoredFile | None = None
    ) -> Upload:
        """Take a part of an upload, complete it with its file, or else cancel it. Raises FileRefused if it is over."""
        with self._write() as connection:
            one = uploads.c.id == upload_id
            before = self._upload_of(connection.execute(select(uploads).where(one).with_for_update()).one())
            if before.status != "pending":
                raise FileRefused(f"the upload is {before.status}")
            if part is not None:
                parts = before.parts | dict([part])
                values: dict[str, Any] = {"parts": msgspec.json.encode(parts).decode()}
            elif file is not None:
                file = self._date(file)
                connection.execute(insert(files).values(msgspec.structs.asdict(file)))
                values = {"status": "completed", "file": file.id}
            else:
                values = {"status": "cancelled"}
            connection.execute(update(uploads).where(one).values(values))
            return self._upload_of(connection.execute(select(uploads).where(one)).one())

    def find_needed(self, names: Collection[str]) -> dict[str, bool]:
        """Of these files and parts of uploads those that the ledger knows, and whether their bytes are needed still."""
        known: dict[str, bool] = {}
        job = or_(jobs.c.training_file == files.c.id, jobs.c.validation_file == files.c.id)
        used = select(jobs.c.id).where(job, jobs.c.finished_at.is_(None)).exists()
        for some in portions(names):
            rows = self._read(select(files.c.id, or_(self._live(), used)).where(files.c.id.in_(some)))
            known |= {name: bool(is_needed) for name, is_needed in rows}
        # Of uploads that are over their parts are of no use a day later.
        for row in self._read(select(uploads).where(uploads.c.created_at > self._clock() - 24 * UPLOAD_S)):
            upload = self._upload_of(row)
            known |= dict.fromkeys(upload.parts.keys() & {*names}, upload.status == "pending")
        return known

    def samples(self, tenant: str, task_ids: Collection[str]) -> list[PromptSample]:
        """The samples of tasks. Of several samples of one run the first counts, which is committed or has a reward."""
        columns = select(*(experiences.c[name] for name in PromptSample._fields)).where(experiences.c.tenant == tenant)
        counted = columns.where(experiences.c.correction == 0, experiences.c.reason.is_distinct_from(_TWICE))
        rows = find(self._read, counted, experiences.c.task_id, task_ids)
        found = [PromptSample(*row)._replace(state=State(row.state)) for row in rows]
        return sorted(found, key=lambda each: (each.state in _WAITING, each.reward is None, each.msg_id))

    def drop_repeated(self, samples: Iterable[PromptSample]) -> list[PromptSample]:
        """Drop what waits beside the first sample of each run: two explorers had it sampled. The others."""
        first = dict[tuple[str, str], PromptSample]()
        again = [each.msg_id for each in samples if first.setdefault((each.task_id, each.run_id), each) is not each]
        if again:
            waiting = experiences.c.msg_id.in_(again), experiences.c.state.in_(_WAITING)
            with self._write() as connection:
                connection.execute(update(experiences).where(*waiting).values(state=State.DROPPED, reason=_TWICE))
        return [*first.values()]

    def _live(self) -> ColumnElement[bool]:
        return and_(files.c.deleted_at.is_(None), or_(files.c.expires_at.is_(None), files.c.expires_at > self._clock()))

    def _date(self, file: StoredFile) -> StoredFile:
        """The file as of now; until then its `expires_at` counts from its `created_at`."""
        now, until = self._clock(), file.expires_at
        kept = None if until is None else now + until - file.created_at
        return msgspec.structs.replace(file, created_at=now, expires_at=kept)

    def _upload_of(self, row: Any) -> Upload:
        values = {**row._mapping, "parts": msgspec.json.decode(row.parts)}
        if row.status == "pending" and row.expires_at <= self._clock():
            values |= {"status": "expired"}
        return Upload(**values)
