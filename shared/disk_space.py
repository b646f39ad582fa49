"""Room on a file system, reckoned before it is used: what is to be written, against what is free beyond a reserve."""

import os
from pathlib import Path
from typing import NamedTuple

#: What the trainer leaves free: this share of the file system, at most so many bytes. More than the explorer's outbox
#: wants there, so that a checkpoint never stops replies from being kept.
RESERVE_SHARE, RESERVE_BYTES = 0.1, 4 << 30


class DiskSpace(NamedTuple):
    """The file system of `folder`, in bytes: what is `needed` there, what is to stay free, what is free."""

    folder: Path
    needed: int
    reserve: int
    free: int

    @property
    def missing(self) -> int:
        """What must be made free before it fits."""
        return max(0, self.needed + self.reserve - self.free)

    @property
    def sentence(self) -> str:
        """It for people."""
        needed, free, reserve = map(gigabytes, (self.needed, self.free, self.reserve))
        sentence = f"the next checkpoint needs {needed}, {free} are free in {self.folder}, {reserve} of them stay free"
        return f"{sentence}: {gigabytes(self.missing)} are missing" if self.missing else sentence


def measure_space(folder: Path, *, needed: int) -> DiskSpace:
    """The room in `folder`, or in the nearest folder above it that is there. Raises OSError."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    disk = os.statvfs(there)
    reserve = min(int(RESERVE_SHARE * disk.f_blocks * disk.f_frsize), RESERVE_BYTES)
    return DiskSpace(folder, needed, reserve, disk.f_bavail * disk.f_frsize)


def gigabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
