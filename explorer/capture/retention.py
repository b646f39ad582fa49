"""Lets the explorer forget: what the settings no longer allow to keep, and what an erased person left in its spool."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import structlog
from msgspec.structs import replace

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.capture.spool import take_slot
from tuneloop.explorer.capture.spool_slots import Slots
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.experience import time_received
from tuneloop.shared.held_files import read_unlinked
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.recording.retention import (
    PURGEABLE,
    Person,
    Retention,
    bounds_of,
    bounds_of_tenants,
    names_in,
    without_erased,
)
from tuneloop.shared.privacy.redactor import pseudonym
from tuneloop.shared.quarantine import clear_drafts, keeping, pieces_of, replace_pieces
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.spool_format import QUARANTINE, slots

log = structlog.get_logger()

#: How often the settings' retention is applied.
PURGE_S = 3600.0
#: How long records stay in a segment that the database has all of.
SEGMENT_S = 300.0


class SpoolRetention:
    """Looks now and then whom to forget, and what."""

    def __init__(
        self,
        settings: Settings,
        retention: Retention,
        spools: Slots,
        *,
        metrics: Metrics,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bounds, self._of_tenants = bounds_of(settings.retention), bounds_of_tenants(settings)
        self._retention = retention
        self._slots = spools
        self._metrics = metrics
        self._purged = {state: metrics.purged.labels(state.value) for state in PURGEABLE}
        self._interval_s = interval_s
        self._clock = clock
        self._key = load_key(settings.job_dir / KEY)
        self._purge_at = clock()
        self._segments: dict[Path, tuple[int, float]] = {}
        self._erased: dict[Person, float] = {}
        self._deleted = 0
        self._cleared: dict[Path, tuple[int, int, int]] = {}

    async def run(self) -> None:
        """Apply the retention and the erasures every `interval_s` seconds."""

        async def look() -> None:
            try:
                await asyncio.to_thread(self.look)
            except OSError as error:  # the disk is away
                log.warning("retention_put_off", reason=str(error))

        await every(self._interval_s, look, task="retention", metrics=self._metrics)

    def look(self) -> None:
        """Forget what is to be forgotten by now."""
        for slot in self._slots.ours:
            # Let a segment go that the database has all of: it would stay until it is full.
            now, end = self._clock(), slot.end
            segment, since = self._segments.get(slot.folder, (0, now))
            if end.segment != segment or not end.offset:
                self._segments[slot.folder] = end.segment, now
            elif now - since >= SEGMENT_S and slot.flushed.position >= end:
                slot.renew()
        self._erase()
        if (self._bounds or self._of_tenants) and self._clock() >= self._purge_at:
            for state, count in self._retention.purge(self._bounds, of_tenants=self._of_tenants).experiences.items():
                self._purged[state].inc(count)
                if count:
                    log.info("experiences_purged", state=state.value, count=count)
            self._purge_at = self._clock() + PURGE_S

    def _erase(self) -> None:
        erased = self._retention.erasures()
        if erased != self._erased:
            for slot in self._slots.ours:
                slot.renew()
            self._cleared.clear()
        self._erased = erased
        for folder in slots(self._slots.root) if erased else ():
            clear_drafts(folder)
        kept = {folder: files for folder in slots(self._slots.root) if (files := kept_files(folder))}
        # To count takes long where many were deleted, and most spools keep nothing.
        deleted = self._retention.deletions() if kept else self._deleted
        if deleted != self._deleted:
            self._cleared.clear()
        self._deleted = deleted
        for folder, files in kept.items() if erased or deleted else ():
            new = [path for path in files if self._cleared.get(path) != _looks(path)]
            # Only the flusher writes to files that stay, and those of our own writers' slots are ours to change; those
            # of another process that lives are its own.
            with (
                suppress(BlockingIOError),
                nullcontext() if self._slots.lives(folder) or not new else take_slot(folder),
            ):
                for path in new:
                    hidden = partial(pseudonym, key=self._key)
                    removed, unread = clear(path, erased, self._retention.deleted_among, hidden=hidden)
                    say = log.warning if unread else log.info
                    say("records_erased", file=str(path), records=removed, unread_bytes=unread)
                    self._cleared[path] = _looks(path)


def _looks(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:  # nothing was left of it
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def kept_files(slot: Path) -> list[Path]:
    """The files of a slot that are not deleted when the database has what the spool held."""
    return sorted(path for name in ("*.torn", "*.kept", QUARANTINE) for path in slot.glob(name))


def clear(
    path: Path,
    erased: Mapping[Person, float],
    deleted_among: Callable[[Collection[str]], Collection[str]] = lambda msg_ids: (),
    *,
    hidden: Callable[[str], str] = lambda name: name,
) -> tuple[int, int]:
    """Write the file anew without what the erased people had said until then, and without what names a deleted reply.

    Returns how many records were taken out, and how many bytes were left that are no record. People are among the
    `erased` by their names, or by what is written in their place: `hidden`. The caller holds the slot.
    """
    with keeping(path.parent):
        pieces = list(pieces_of(read_unlinked(path)))
        dated = [each.record and replace(each.record, received_at=time_received(each.record)) for each in pieces]
        records = [each for each in dated if each is not None]
        deleted = deleted_among({msg_id for each in records for msg_id in names_in(each)})
        kept = {id(record) for record in without_erased(records, erased, deleted=deleted, hidden=hidden)}
        left = [each for each, record in zip(pieces, dated, strict=True) if record is None or id(record) in kept]
        if len(left) < len(pieces):
            replace_pieces(path, left)
    return len(pieces) - len(left), sum(len(each.data) for each in left if each.record is None)
