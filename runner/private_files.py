"""Files and folders that their owner alone may read, whatever the umask: they hold what people said, and keys."""

import os
from pathlib import Path


def private_opener(path: str, flags: int) -> int:
    """What `open` is given as `opener`, so that a file that is made is its owner's alone."""
    return os.open(path, flags, 0o600)


def write_private_text(path: Path, text: str) -> None:
    """Write a file that is its owner's alone, or write it anew. Raises OSError."""
    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(text)


def make_private_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Make a folder; those above it that are missing too, with the umask's rights. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=exist_ok)
