"""Keeps feedback in a folder until it is sent. Processes may share the folder: each writes its own files."""

import errno
import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from tuneloop.runner.errors import OutboxFull
from tuneloop.runner.feedback.verbs import Entry
from tuneloop.runner.outbox import SUFFIX, Damage, Outbox, OutboxReader, Place, Record, names_in, owner_of
from tuneloop.runner.private_files import append_rows, private_opener

_FILE_BYTES = 4 << 20  # largest size of a file in bytes
_SENT_BYTES = 64 << 10  # a file whose sent bytes exceed this is replaced, which bounds what is sent again after a crash
_BATCH_ENTRIES, _BATCH_BYTES = 500, 1 << 20  # limits of a batch; the record that exceeds the bytes is its last
_OPEN_FILES = 64  # files of ended processes that are open at once

_REFUSED = "refused.jsonl"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnsentEntries:
    """Entries of a file up to the offset `end`."""

    file: OutboxReader
    entries: Sequence[Entry]
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedEntry:
    """An entry that the service will never accept, and the reason."""

    entry: Entry
    reason: str


class FeedbackOutbox:
    """Stores entries and returns them in order, those of ended processes first, until they are sent."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self._max_bytes = folder, max_bytes
        self.sent = self.refused = 0
        self._set_aside: set[bytes] = set()
        self._unreadable: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._outbox = Outbox(self.folder, _FILE_BYTES)
        self._taken: dict[str, int] = {}  # sent bytes by file id
        self._files: list[OutboxReader] = []  # in sending order
        self._entries: Counter[str] = Counter()  # unsent entries by file id
        self._last = Place("", 0)  # the last acknowledged record
        self._others_bytes = self._sent_bytes = 0

    @property
    def pending(self) -> int:
        with self._lock:
            return (+self._entries).total()  # a file may be sent before it is counted

    def put(self, entries: Sequence[Entry]) -> None:
        """Sync the entries to disk. Raises OutboxFull or OSError, and then keeps none."""
        waiting = self._others_bytes + self._outbox.written - self._sent_bytes
        if waiting >= self._max_bytes:
            raise OutboxFull(f"{waiting} bytes of feedback wait to be sent, max_bytes is {self._max_bytes}")
        try:
            place = self._outbox.append([json.dumps(entries, allow_nan=False).encode()])
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise OutboxFull(f"{self.folder}: {error.strerror}") from error
            raise
        with self._lock:
            self._entries[place.file] += len(entries)
            self._last = max(self._last, place)

    def next_batch(self) -> UnsentEntries | None:
        """The next entries of one file to send, or None."""
        counted: set[str] = set()
        for is_second in (False, True):
            if is_second:
                counted = set(self._entries)
                self._find_files()
            for file in [*self._files]:
                try:
                    if (batch := self._read(file)) is not None:
                        return batch
                    if not file.is_claimed:
                        continue
                    if file.is_there:
                        file.path.unlink(missing_ok=True)
                except (OSError, ValueError) as error:
                    log.error("feedback that waits in %s cannot be sent: %s", file.path, error)
                    self._unreadable.add(file.id)
                self._files.remove(file)
                file.close()
        with self._lock:
            for id_ in counted - {file.id for file in self._files}:  # another process sends or sent it
                del self._entries[id_]
        return None

    def note_sent(self, batch: UnsentEntries, refused: int) -> None:
        """Mark a batch as sent, of which `refused` entries were set aside."""
        with self._lock:
            self._entries[batch.file.id] -= len(batch.entries)
        self._sent_bytes += batch.end - self._taken.get(batch.file.id, 0)
        self._taken[batch.file.id] = batch.end
        self.sent += len(batch.entries) - refused
        if not batch.file.is_claimed and batch.end == batch.file.size > _SENT_BYTES:
            self._outbox.begin_new_file()

    def set_aside(self, entry: Entry, reason: str) -> None:
        """Keep an entry that the service will never accept, on disk, for inspection."""
        if (digest := _digest(entry)) in self._set_aside:
            return
        path = self.folder / _REFUSED
        if path.exists() and path.stat().st_size > self._max_bytes:
            path.replace(path.with_suffix(".old.jsonl"))
        append_rows(path, [{"reason": reason, "entry": entry}])
        self._set_aside.add(digest)
        self.refused += 1
        log.warning("feedback was refused and is kept in %s: %s", path, reason)

    def refusals(self) -> list[RefusedEntry]:
        """Entries set aside by any process, oldest first."""
        path = self.folder / _REFUSED
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = {}
        for line in lines:
            with suppress(ValueError):  # partial: written now, or cut off by a crash
                each = json.loads(line)
                found[_digest(each["entry"])] = each
        return [RefusedEntry(entry=each["entry"], reason=each["reason"]) for each in found.values()]

    def look(self) -> None:
        """Find the files of ended processes. An unreadable one stays, and is logged."""
        waiting = -sum(self._taken.get(file.id, 0) for file in self._files)
        for name in names_in(self.folder):
            with suppress(OSError, ValueError), closing(OutboxReader(self.folder / name)) as file:
                waiting += file.size
                if file.id not in self._entries and file.claim():
                    entries = sum(len(json.loads(each.payload)) for each in file.read(0) if isinstance(each, Record))
                    with self._lock:
                        self._entries[file.id] = entries
        self._others_bytes = waiting - (self._outbox.written - self._sent_bytes)

    def close(self) -> None:
        """Release unsent files to the next process."""
        self._outbox.close()
        try:
            self.next_batch()  # removes sent files
        finally:
            self._close_files()

    def forget_parents_files(self) -> None:
        """Release the parent's files, in a forked child."""
        self._outbox.forget_file()
        self._close_files()
        self._begin()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def _find_files(self) -> None:
        """Open our files and those of ended processes, which come first. Raises OSError."""
        known = self._unreadable | {file.id for file in self._files}
        for name in names_in(self.folder):
            is_later = len(self._files) >= _OPEN_FILES and owner_of(name) != self._outbox.owner
            if is_later or name.removesuffix(SUFFIX) in known:
                continue
            try:
                file = OutboxReader(self.folder / name)
            except FileNotFoundError:  # sent and removed by its process
                continue
            except OSError as error:
                log.error("feedback that waits in %s cannot be sent: %s", self.folder / name, error)
                self._unreadable.add(name.removesuffix(SUFFIX))
                continue
            if file.is_there if file.claim() else file.owner == self._outbox.owner:
                self._files.append(file)
            else:
                file.close()
        self._files.sort(key=lambda file: (not file.claim(), file.id))

    def _read(self, file: OutboxReader) -> UnsentEntries | None:
        """Acknowledged, unsent entries. Damaged bytes are copied to a file beside."""
        entries: list[Entry] = []
        end = taken = self._taken.get(file.id, 0)
        for found in file.read(end):
            if isinstance(found, Damage):
                kept = file.path.with_name(f"{file.id}.{end}.damaged")
                if not kept.exists() or kept.read_bytes() != found.data:
                    log.error("%d bytes of %s from byte %d on are damaged", len(found.data), file.path, end)
                    with open(kept, "wb", opener=private_opener) as copy:
                        copy.write(found.data)
            elif not file.is_claimed and Place(file.id, found.number) > self._last:
                break
            else:
                entries += json.loads(found.payload)
            end = found.end
            if len(entries) >= _BATCH_ENTRIES or end - taken >= _BATCH_BYTES:
                break
        return UnsentEntries(file, entries, end) if end > taken else None


def _digest(entry: Entry) -> bytes:
    """Equal for an entry that is set aside again; the parts of a score share one idempotency key."""
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).digest()
