"""The files of a session of choosing, from which it goes on after a break: pairs, and what was said of them.

A row is appended as a JSON line. A last line that was cut off is as if it had never been written.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tuneloop.runner.collection.blind_pairs import CHOICES, BlindPair, HumanPreference
from tuneloop.runner.errors import LogRefused
from tuneloop.runner.private_files import append_rows, is_row, split_last_line

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
    append_rows(path, [asdict(row)])


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    whole, last = split_last_line(path.read_bytes() if path.exists() else b"")
    lines = whole.split(b"\n") + ([last] if is_row(last) else [])
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not is_row(line):
            raise LogRefused(f"{path}:{number}: a line must be a JSON object")
        yield f"{path}:{number}", json.loads(line)


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
