"""The folder in which feedback waits to be sent. Several processes may share it: each writes files of its own."""

import errno
import hashlib
import json
import logging
import threading
import zlib
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from tuneloop.runner.errors import OutboxFull
from tuneloop.runner.feedback.verbs import Entry
from tuneloop.runner.outbox import SUFFIX, Outbox, OutboxFile, Record, lock
from tuneloop.runner.private_files import append_rows

#: A file of so many bytes is followed by another.
_FILE_BYTES = 4 << 20

#: A file of so many bytes, all sent, is followed by another: what is sent again after a crash is at most so much.
_SENT_BYTES = 64 << 10

#: A batch has no more entries, and no further record once it has so many bytes.
_BATCH_ENTRIES, _BATCH_BYTES = 500, 1 << 20

_REFUSED = "refused.jsonl"

_OLD_SUFFIX = ".outbox"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnsentEntries:
    """What is to be sent next: the entries of a file up to the offset `end`."""

    file: OutboxFile
    entries: Sequence[Entry]
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedEntry:
    """An entry that the service will never take, and why."""

    entry: Entry
    reason: str


class FeedbackOutbox:
    """Takes entries, and hands them out in their order until they are noted as sent.

    What processes that ended have left there comes first. At most `max_bytes` wait, all processes' together.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self._max_bytes = folder, max_bytes
        self.sent = self.refused = 0
        self._set_aside: set[bytes] = set()
        self._unreadable: set[Path] = set()
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._outbox = Outbox(self.folder, _FILE_BYTES)
        self._claimed: OutboxFile | None = None
        self._left: dict[Path, int] = {}  # unclaimed files, oldest first, and the entries in each
        self._pending = self._others_bytes = 0

    @property
    def pending(self) -> int:
        """How many entries wait, of ours and of processes that ended."""
        with self._lock:
            return self._pending + sum(self._left.values())

    def put(self, entries: Sequence[Entry]) -> None:
        """Return when the entries are on disk, all of them or, with OutboxFull or OSError, none."""
        with self._lock:
            waiting = self._others_bytes + sum(file.end - file.taken for file in self._outbox.files)
        if waiting >= self._max_bytes:
            raise OutboxFull(f"{waiting} bytes of feedback wait to be sent, max_bytes is {self._max_bytes}")
        try:
            self._outbox.append([json.dumps(entries, allow_nan=False).encode()])
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise OutboxFull(f"{self.folder}: {error.strerror}") from error
            raise
        with self._lock:
            self._pending += len(entries)

    def next_batch(self) -> UnsentEntries | None:
        """What is to be sent next, some hundred entries of one file, if anything waits."""
        while (file := self._claimed or self._claim() or next(iter(self._outbox.files), None)) is not None:
            entries: list[Entry] = []
            end = file.taken
            for found in file.read(file.taken):
                end = found.end
                if isinstance(found, Record):
                    entries += json.loads(found.payload)
                else:
                    file.is_damaged = True
                    log.error("%d bytes of %s before byte %d are damaged", found.size, file.path, end)
                if len(entries) >= _BATCH_ENTRIES or end - file.taken >= _BATCH_BYTES:
                    break
            if end > file.taken:
                return UnsentEntries(file, entries, end)
            if file is self._claimed:
                self._claimed = None
                file.remove()
            elif not self._outbox.remove(file):
                break
        return None

    def note_sent(self, batch: UnsentEntries, refused: int) -> None:
        """They need not be sent again, nor will they be; so many of them were set aside."""
        batch.file.taken = batch.end
        with self._lock:
            self._pending -= len(batch.entries)
        self.sent += len(batch.entries) - refused
        if batch.file.taken == batch.file.end > _SENT_BYTES:
            self._outbox.begin_new_file()

    def set_aside(self, entry: Entry, reason: str) -> None:
        """Keep an entry that the service will never take, to be looked at: on disk before this returns."""
        if (digest := _digest(entry)) in self._set_aside:
            return
        path = self.folder / _REFUSED
        if path.exists() and path.stat().st_size > self._max_bytes:
            path.replace(path.with_suffix(".old.jsonl"))
        append_rows(path, [{"reason": reason, "entry": entry}])
        self._set_aside.add(digest)
        self.refused += 1
        log.warning("feedback is refused, and lies in %s: %s", path, reason)

    def refusals(self) -> list[RefusedEntry]:
        """What was set aside, by whichever process, oldest first."""
        path = self.folder / _REFUSED
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = {}
        for line in lines:
            with suppress(ValueError):  # being written by another process, or cut off by a crash: it is set aside again
                each = json.loads(line)
                found[_digest(each["entry"])] = each
        return [RefusedEntry(entry=each["entry"], reason=each["reason"]) for each in found.values()]

    def look(self) -> None:
        """Find the files of processes that ended. One that cannot be read stays, and is logged."""
        self._convert_old_files()
        ours = {file.path.name for file in (*self._outbox.files, *filter(None, [self._claimed]))}
        left, others_bytes = {}, 0
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if path.name in ours:
                continue
            try:
                others_bytes += path.stat().st_size
                if path in self._left:
                    left[path] = self._left[path]
                elif (file := OutboxFile.claim(path)) is not None:
                    with closing(file):
                        left[path] = _entries_in(file)
            except FileNotFoundError:  # its process has sent it
                continue
            except OSError as error:
                if path not in self._unreadable:
                    self._unreadable.add(path)
                    log.error("feedback that waits in %s cannot be sent: %s", path, error)
        with self._lock:
            self._left, self._others_bytes = left, others_bytes

    def close(self) -> None:
        """Leave what waits to whoever opens the folder next."""
        if self._claimed is not None:
            self._claimed.close()
            self._claimed = None
        self._outbox.close()

    def forget_parents_files(self) -> None:
        """In a forked child: leave the parent's files to it."""
        for file in (*self._outbox.files, *filter(None, [self._claimed])):
            file.close()
        self._begin()

    def _claim(self) -> OutboxFile | None:
        """Open the oldest file that a process has left."""
        while self._left:
            path = next(iter(self._left))
            with self._lock:
                entries = self._left.pop(path)
                if (file := OutboxFile.claim(path)) is not None:
                    self._claimed, self._pending = file, self._pending + entries
                    self._others_bytes -= file.end
                    return file
        return None

    def _convert_old_files(self) -> None:
        """Take in what a version before this file format left: lines of a checksum, a space, and a list of entries."""
        for path in sorted(self.folder.glob(f"*{_OLD_SUFFIX}")):
            with suppress(FileNotFoundError), open(path, "rb+") as file:
                if not lock(file.fileno()) or not path.exists():
                    continue
                for line in file:
                    if line.endswith(b"\n") and line[:8] == b"%08x" % zlib.crc32(line[9:-1]):
                        self.put(json.loads(line[9:-1]))
                    else:
                        log.error("feedback is lost: a line of %s is damaged or cut off", path)
                path.unlink()
                Path(f"{path}.sent").unlink(missing_ok=True)


def _entries_in(file: OutboxFile) -> int:
    return sum(len(json.loads(each.payload)) for each in file.read(0) if isinstance(each, Record))


def _digest(entry: Entry) -> bytes:
    """The same for an entry that is set aside again; the parts of a score share one idempotency key."""
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).digest()
