"""Rows of files that the standard library reads: JSON lines, JSON, CSV. A broken row is named by its line."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import DatasetRefused


def written_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, each a dictionary. Raises DatasetRefused as `FILE:LINE: what is wrong`."""
    try:
        yield from READERS[file.suffix.lower()](file)
    except UnicodeDecodeError as error:
        line = file.read_bytes()[: error.start].count(b"\n") + 1
        raise DatasetRefused(f"{file}:{line}: this is not UTF-8: {error.reason}") from None
    except OSError as error:
        raise DatasetRefused(f"{file}: {error.strerror}") from None


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_text(file).split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DatasetRefused(f"{file}:{number}: this is not JSON: {error}") from None
            yield _object(row, f"{file}:{number}")


def _json(file: Path) -> Iterator[dict[str, Any]]:
    """A list of objects; an object that holds one list of them; or JSON lines under that name."""
    text = _text(file)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _json_lines(file)
            return
        raise DatasetRefused(f"{file}:{error.lineno}: this is not JSON: {error.msg}") from None
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        if len(lists) != 1:
            yield found  # a single row
            return
        [found] = lists
    if not isinstance(found, list):
        raise DatasetRefused(f"{file}: this is {type(found).__name__}, not a list of objects")
    for number, row in enumerate(found, start=1):
        yield _object(row, f"{file}: entry {number}")


def _csv(file: Path) -> Iterator[dict[str, Any]]:
    """Values are strings: `007` stays what it is."""
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter="\t" if file.suffix.lower() == ".tsv" else ",")
        header = next(reader, None)
        if header is None:
            return
        for row in reader:
            if len(row) != len(header) and row:
                raise DatasetRefused(f"{file}:{reader.line_num}: {len(row)} columns; the header has {len(header)}")
            if row:
                yield dict(zip(header, row, strict=True))


def _text(file: Path) -> str:
    data = file.read_bytes()
    return data.decode("utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8")


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DatasetRefused(f"{where}: a task must be an object, not {type(row).__name__}")
    return row


READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
}
