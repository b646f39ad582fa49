"""Writes files and folders that only their owner can read, whatever the umask: they hold conversations and keys."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def private_opener(path: str, flags: int) -> int:
    """An `opener` for `open` that creates files with mode 0600."""
    return os.open(path, flags, 0o600)


def write_private_text(path: Path, text: str) -> None:
    """Write or overwrite a private file. Raises OSError."""
    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(text)


def make_private_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Create a private folder; missing parents get the umask's rights. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=exist_ok)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines to a private file. Raises OSError and leaves the file unchanged."""
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
            if whole:  # an editor dropped the newline
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
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
