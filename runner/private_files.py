"""Files and folders that their owner alone may read, whatever the umask: they hold what people said, and keys."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def private_opener(path: str, flags: int) -> int:
    """What `open` is given as `opener`, so that a file that is made is its owner's alone."""
    return os.open(path, flags, 0o600)


def write_private_text(path: Path, text: str) -> None:
    """Write a file that is its owner's alone, or write it again. Raises OSError."""
    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(text)


def make_private_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Make a folder; those above it that are missing too, with the umask's rights. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=exist_ok)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines to a file that is its owner's alone. Raises OSError, and has written nothing then."""
    lines = b"".join(json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n" for row in rows)
    with open(path, "ab+", buffering=0, opener=private_opener) as file:
        with suppress(ImportError):  # Windows
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        file.seek(0)
        content = file.read()
        if last := content.rpartition(b"\n")[2]:
            try:
                whole = isinstance(json.loads(last), dict)
            except (ValueError, RecursionError):
                whole = False
            if whole:  # an editor left it so
                lines = b"\n" + lines
            else:
                file.truncate(len(content) - len(last))
        end = file.seek(0, os.SEEK_END)
        try:
            while lines:
                lines = lines[file.write(lines) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def is_named(descriptor: int, path: Path) -> bool:
    """Whether the path is that of the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
