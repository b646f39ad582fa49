"""The files of a session of choosing, from which it goes on after a break: pairs, and what was said of them.

A row is appended as a JSON line. A last line that was cut off is as if it had never been written.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any

from tuneloop.runner.collection.blind_pairs import CHOICES, BlindPair, HumanPreference
from tuneloop.runner.errors import LogRefused
from tuneloop.runner.private_files import private_opener

_TEXTS = ("preferred", "rejected", "source")


def read_pairs(path: Path) -> Iterator[BlindPair]:
    """The pairs of a file; none if there is no file. Raises LogRefused for a line that is none."""
    for where, row in _rows(path):
        try:
            tuples: dict[str, Any] = {name: _two(row, name) for name in ("texts", "ids", "versions")}
            if tuples["texts"] is None or not all(isinstance(each, dict) for each in row["messages"]):
                raise ValueError("texts and messages are needed")
            yield BlindPair(pair_id=str(row["pair_id"]), messages=tuple(row["messages"]), **tuples)
        except (KeyError, TypeError, ValueError) as error:
            raise LogRefused(f"{where}: not a pair: {error!r}") from None


def read_preferences(path: Path) -> dict[tuple[str, str | None], HumanPreference]:
    """What each said last of each pair, by the pair's id and who says it; nothing if there is no file.

    Raises LogRefused for a line that is no preference.
    """
    preferences = (_preference(where, row) for where, row in _rows(path))
    return {(each.pair_id, each.source): each for each in preferences}


def append_line(path: Path, row: BlindPair | HumanPreference) -> None:
    """Append a row to a file. It is on disk when this returns."""
    line = json.dumps(asdict(row), ensure_ascii=False).encode(errors="replace") + b"\n"
    with open(path, "ab+", opener=private_opener) as file:
        _lock(file)
        if file.seek(0, os.SEEK_END) and not _ends_a_line(file):
            file.seek(0)
            whole, last = _parts(file.read())
            if _is_row(last):  # an editor left it so
                line = b"\n" + line
            else:
                file.truncate(len(whole))
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    whole, last = _parts(path.read_bytes() if path.exists() else b"")
    lines = whole.split(b"\n") + ([last] if _is_row(last) else [])
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not _is_row(line):
            raise LogRefused(f"{path}:{number}: a line must be a JSON object")
        yield f"{path}:{number}", json.loads(line)


def _ends_a_line(file: IO[bytes]) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _parts(content: bytes) -> tuple[bytes, bytes]:
    """The lines with an end, and what comes after them."""
    whole, end, last = content.rpartition(b"\n")
    return whole + end, last


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _two(row: dict[str, Any], name: str) -> tuple[str, str] | None:
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{name}: two are needed")
    return str(value[0]), str(value[1])


def _preference(where: str, row: dict[str, Any]) -> HumanPreference:
    known = {each.name for each in fields(HumanPreference)}
    if unknown := sorted(row.keys() - known):
        raise LogRefused(f"{where}: not a preference: {unknown[0]!r} is none of {', '.join(sorted(known))}")
    texts = all(isinstance(row.get(name), str | None) for name in _TEXTS)
    if not isinstance(row.get("pair_id"), str) or row.get("choice") not in CHOICES or not texts:
        raise LogRefused(f"{where}: not a preference: it needs a pair_id, and a choice of {', '.join(CHOICES)}")
    return HumanPreference(**row)


def _lock(file: IO[bytes]) -> None:
    """Wait until nobody else appends. It is ours until the file is closed."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    fcntl.flock(file, fcntl.LOCK_EX)
