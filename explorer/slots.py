"""The slots below a spool's root that our own writers fill, in this process or in others of ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from explorer.spool import FlushedMark, SharedEnd
from shared.spool_files import Position


class Slot(Protocol):
    """A slot and its writer, as those see it who move what it holds: a Spool, or one in another process."""

    @property
    def folder(self) -> Path:
        """Where it lies."""

    @property
    def end(self) -> Position:
        """Everything before this is on disk."""

    @property
    def flushed(self) -> FlushedMark:
        """How far the database has it."""

    def renew(self) -> None:
        """Begin a new segment, so that the old one can be forgotten."""


class Slots:
    """The slots of those of our writers that live, or have died and left something that is not in the database yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ours: dict[Path, Slot] = {}
        self._left: set[Path] = set()

    @property
    def ours(self) -> list[Slot]:
        """Living and dead."""
        return list(self._ours.values())

    def add(self, slot: Slot) -> None:
        """A writer begins in a slot; perhaps in one where another has died."""
        self._left.discard(slot.folder)
        self._ours[slot.folder] = slot

    def leave(self, slot: Slot) -> None:
        """The writer is no more."""
        if self._ours.get(slot.folder) is slot:
            self._left.add(slot.folder)

    def lives(self, folder: Path) -> bool:
        """Whether a writer of ours is there."""
        return folder in self._ours and folder not in self._left

    def adopted(self, folder: Path) -> None:
        """Nothing is left of what a dead writer wrote."""
        if folder in self._left:
            self._left.discard(folder)
            self._ours.pop(folder, None)


class RemoteSlot:
    """A slot that another process of ours fills. `renew` may be called from any thread."""

    def __init__(self, folder: Path, renew: Callable[[], None]) -> None:
        self.folder = folder
        self.flushed = FlushedMark(folder / "flushed")
        self._end = SharedEnd(folder)
        self._renew = renew

    @property
    def end(self) -> Position:
        """Everything before this is on disk."""
        return self._end.position

    def renew(self) -> None:
        """Have the other process begin a new segment."""
        self._renew()
