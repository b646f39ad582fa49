"""The folder in which feedback waits to be sent. Several processes may share it: each writes files of its own."""

import errno
import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tuneloop.runner.errors import OutboxFull
from tuneloop.runner.feedback.segments import SUFFIX, Segment, sync_folder
from tuneloop.runner.feedback.verbs import Entry
from tuneloop.runner.private_files import append_rows

#: A file of so many bytes is followed by another, so that what was sent leaves the disk.
_SEGMENT_BYTES = 4 << 20

#: A batch has no more entries, and no further line once it has so many bytes.
_BATCH_ENTRIES, _BATCH_BYTES = 500, 1 << 20

_REFUSED = "refused.jsonl"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is to be sent next: the entries of a file up to the offset `end`."""

    segment: Segment
    entries: Sequence[Entry]
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedEntry:
    """An entry that the service will never take, and why."""

    entry: Entry
    reason: str


class Outbox:
    """Takes entries, and hands them out in their order until they are noted as sent.

    What processes that ended have left there comes first. At most `max_bytes` wait, all processes' together.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self._max_bytes = folder, max_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.sent = self.refused = 0
        self._set_aside: set[bytes] = set()
        self._unreadable: set[Path] = set()
        self._own: Segment | None = None
        self._older: list[Segment] = []
        self._forget()

    @property
    def pending(self) -> int:
        """How many entries wait, of ours and of processes that ended."""
        with self._lock:
            return sum(each.waiting for each in self._segments())

    def put(self, entries: Sequence[Entry]) -> None:
        """Return when the entries are on disk, all of them or, with OutboxFull or OSError, none."""
        try:
            with self._lock:
                waiting = self._others_bytes + sum(each.unsent_bytes for each in self._segments())
                if waiting >= self._max_bytes:
                    raise OutboxFull(f"{waiting} bytes of feedback wait to be sent, max_bytes is {self._max_bytes}")
                if self._own is not None and self._own.end >= _SEGMENT_BYTES:
                    self._older.append(self._own)
                    self._own = None
                if self._own is None:
                    self._own = Segment.create(self.folder)
                    sync_folder(self.folder.parent)
                segment = self._own
                written = segment.write(entries)
            segment.sync(written)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise OutboxFull(f"{self.folder}: {error.strerror}") from error
            raise

    def next_batch(self) -> Waiting | None:
        """What is to be sent next, some hundred entries of one file, if anything waits."""
        with self._lock:
            for segment in self._segments():
                if segment.waiting:
                    entries: list[Entry] = []
                    first = end = segment.sent
                    for line, end in segment.read(first):
                        entries += line
                        if len(entries) >= _BATCH_ENTRIES or end - first >= _BATCH_BYTES:
                            break
                    return Waiting(segment, entries, end)
                if segment is not self._own and segment.is_done:
                    self._older.remove(segment)
                    segment.close(remove=True)
        return None

    def note_sent(self, batch: Waiting, refused: int) -> None:
        """They need not be sent again, nor will they be; so many of them were set aside."""
        batch.segment.advance(batch.end, len(batch.entries))
        self.sent += len(batch.entries) - refused

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

    def adopt(self) -> None:
        """Take over the files of processes that ended. One that cannot be read stays, and is logged."""
        with self._lock:
            ours = {each.path for each in self._segments()}
            self._others_bytes = 0
            for path in sorted(self.folder.glob(f"*{SUFFIX}")):
                if path in ours:
                    continue
                try:
                    if (segment := Segment.adopt(path)) is not None:
                        self._older.append(segment)
                        continue
                    with suppress(FileNotFoundError):  # its process has sent it
                        self._others_bytes += path.stat().st_size
                except OSError as error:
                    if path not in self._unreadable:
                        self._unreadable.add(path)
                        log.error("feedback that waits in %s cannot be sent: %s", path, error)
            self._older.sort(key=lambda each: each.path)

    def close(self) -> None:
        """Leave what waits to whoever opens the folder next."""
        with self._lock:
            for segment in self._segments():
                segment.close(remove=segment.is_done)
            self._older, self._own = [], None

    def forget_parents_files(self) -> None:
        """In a forked child: leave the parent's files to it."""
        for segment in self._segments():
            segment.abandon()
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._own, self._older = None, []
        self._others_bytes = 0

    def _segments(self) -> list[Segment]:
        return [*self._older, *([self._own] if self._own else [])]


def _digest(entry: Entry) -> bytes:
    """The same for an entry that is set aside again; the parts of a score share one idempotency key."""
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).digest()
