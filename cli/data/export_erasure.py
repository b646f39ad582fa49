"""Takes the rows of an erased person out of a file that was exported, JSON lines or Parquet.

A file is written anew beside its place and then put there: whoever reads it has the old one or the new one, whole.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tuneloop.shared.ledger.recording.erasures import stored

_NAMES = ("user", "other_user")
_REPLIES = ("msg_id", "other_msg_id")
_COLUMNS = (*_NAMES, *_REPLIES, "tenant", "said_by", "feedback")


class Theirs(NamedTuple):
    """How the rows of a person are known: by their replies, or by their name where those are not known any more."""

    tenant: str
    user: str
    msg_ids: frozenset[str]

    def has(self, row: Mapping[str, Any]) -> bool:
        """Whether the row holds something of theirs: their reply, or what they said of one."""
        said = [each for each in row.get("feedback") or () if isinstance(each, dict)]
        if any(each.get(name) in self.msg_ids for each in (row, *said) for name in _REPLIES):
            return True
        if row.get("tenant") not in (None, self.tenant):
            return False
        names = [
            *(row.get(name) for name in _NAMES),
            *(row.get("said_by") or ()),
            *(each.get("source") for each in said),
        ]
        return stored(self.user) in names


class Cleared(NamedTuple):
    """What became of a file: the rows taken out and those left, and what could not be done."""

    path: str
    removed: int = 0
    left: int = 0
    problem: str | None = None


def clear(path: str, theirs: Theirs, *, dry_run: bool = False) -> Cleared:
    """Take their rows out of the file; with `dry_run`, only count them."""
    try:
        if path.endswith(".parquet"):
            return _clear_parquet(Path(path), theirs, dry_run)
        return _clear_lines(Path(path), theirs, dry_run)
    except ImportError:
        return Cleared(path, problem="Parquet files need pyarrow: pip install 'tuneloop[parquet]'")
    except OSError as error:
        return Cleared(path, problem=error.strerror or str(error))
    except ValueError as error:  # pyarrow's: it is no Parquet file
        return Cleared(path, problem=f"cannot be read: {str(error).splitlines()[0]}")


def _clear_lines(path: Path, theirs: Theirs, dry_run: bool) -> Cleared:
    removed = left = unread = 0
    for _, row in _lines(path):
        taken = row is not None and theirs.has(row)
        removed, left, unread = removed + taken, left + (not taken), unread + (row is None)
    if removed and not dry_run:
        with _replacing(path) as draft, draft.open("wb") as file:
            file.writelines(line for line, row in _lines(path) if row is None or not theirs.has(row))
    problem = f"{unread} lines are no rows of ours and were left as they are" if unread else None
    return Cleared(str(path), removed, left, problem)


def _lines(path: Path) -> Iterator[tuple[bytes, Mapping[str, Any] | None]]:
    with path.open("rb") as file:
        for line in file:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            yield line, row if isinstance(row, dict) else None


def _clear_parquet(path: Path, theirs: Theirs, dry_run: bool) -> Cleared:
    import pyarrow
    import pyarrow.parquet

    with path.open("rb") as source, pyarrow.parquet.ParquetFile(source) as file:
        columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
        groups = (file.read_row_group(number, columns=columns) for number in range(file.num_row_groups))
        kept = [[not theirs.has(row) for row in group.to_pylist()] for group in groups]
        removed = sum(row is False for group in kept for row in group)
        if removed and not dry_run:
            with _replacing(path) as draft:
                _write_parquet(file, draft, kept, filter_of=lambda rows: pyarrow.array(rows, pyarrow.bool_()))
    return Cleared(str(path), removed, sum(map(len, kept)) - removed)


def _write_parquet(
    file: Any, draft: Path, kept: Sequence[Sequence[bool]], *, filter_of: Callable[[Sequence[bool]], Any]
) -> None:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(draft, file.schema_arrow, compression="zstd") as writer:
        for number, rows in enumerate(kept):
            writer.write_table(file.read_row_group(number).filter(filter_of(rows)))


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside it, which takes its place when all went well."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield draft
        shutil.copymode(path, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
