"""Takes erased people and deleted replies out of the files that a spool keeps for good: quarantine, torn segments."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from tuneloop.shared.experience import time_received
from tuneloop.shared.held_files import read_unlinked
from tuneloop.shared.ledger.recording.retention import Person, names_in, without_erased
from tuneloop.shared.quarantine import keeping, pieces_of, replace_pieces
from tuneloop.shared.spool_format import QUARANTINE

#: Those of some replies that were deleted.
DeletedAmong = Callable[[Collection[str]], Collection[str]]


class Cleared(NamedTuple):
    """The records that were taken out of a file, and the bytes in it that are no record and were left."""

    removed: int
    unread_bytes: int


def kept_files(slot: Path) -> list[Path]:
    """The files of a slot that are not deleted when the database has what the spool held."""
    return sorted(path for name in ("*.torn", "*.kept", QUARANTINE) for path in slot.glob(name))


def clear(
    path: Path,
    erased: Mapping[Person, float],
    deleted_among: DeletedAmong = lambda msg_ids: (),
    *,
    hidden: Callable[[str], str] = lambda name: name,
) -> Cleared:
    """Write the file anew without what the erased people had said until then, and without what names a deleted reply.

    People are among the `erased` by their names, or by what is written in their place: `hidden`. The caller holds the
    slot.
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
    return Cleared(len(pieces) - len(left), sum(len(each.data) for each in left if each.record is None))
