"""Takes the rows of an erased person out of a file that was exported, JSON lines or Parquet.

The new file is written beside the old one and renamed: a reader has the old one or the new one, whole.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from tuneloop.cli.data.drafts import DraftFile, clear_left_drafts, in_turn
from tuneloop.cli.data.progress import with_progress
from tuneloop.shared.experience import person_behind
from tuneloop.shared.ledger.recording.retention import stored_name

_NAMES = ("user", "other_user")
_REPLIES = ("msg_id", "other_msg_id")
#: Exports of older versions have the second in place of the first.
_SOURCES = ("feedback_sources", "said_by")
_COLUMNS = (*_NAMES, *_REPLIES, "tenant", *_SOURCES, "feedback")


class Person(NamedTuple):
    """Whose rows to erase: found by their replies, or by their names where the ledger no longer has those."""

    tenant: str
    users: tuple[str, ...]
    msg_ids: frozenset[str]

    def owns(self, row: Mapping[str, Any]) -> bool:
        """Whether the row holds their reply, or their feedback on one."""
        feedback = [each for each in row.get("feedback") or () if isinstance(each, dict)]
        if any(each.get(name) in self.msg_ids for each in (row, *feedback) for name in _REPLIES):
            return True
        if row.get("tenant") not in (None, self.tenant):
            return False
        names = [
            *(row.get(name) for name in _NAMES),
            *(person_behind(source) for name in _SOURCES for source in row.get(name) or ()),
            *(person_behind(each["source"]) for each in feedback if each.get("source")),
        ]
        return any(stored_name(user) in names for user in self.users)


class FileErasure(NamedTuple):
    """The result for a file: the rows removed and those left, and what could not be done."""

    path: str
    removed: int = 0
    left: int = 0
    problem: str | None = None


def erase_rows(path: str, person: Person, *, dry_run: bool = False) -> FileErasure:
    """Remove the person's rows from the file, and drafts of it that were left; with `dry_run`, only count them.

    Of a link, the file that it names is changed: by its own name it would keep the rows.
    """
    found = Path(os.path.realpath(path))
    done = _erase(found, person, dry_run, is_parquet=path.endswith(".parquet"))
    left = [] if dry_run else [why for each in dict.fromkeys([Path(path), found]) for why in clear_left_drafts(each)]
    problems = [*([done.problem] if done.problem else []), *left]
    return done._replace(path=path, problem="; ".join(problems) or None)


def _erase(path: Path, person: Person, dry_run: bool, *, is_parquet: bool) -> FileErasure:
    try:
        with in_turn(path):  # else what is read here would undo what another erasure, or an export, writes meanwhile
            return _erase_parquet(path, person, dry_run) if is_parquet else _erase_lines(path, person, dry_run)
    except ImportError:
        problem = 'Parquet files need pyarrow: in a clone, pip install ./runner ".[parquet]"'
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:  # pyarrow's: it is no Parquet file
        problem = f"cannot be read: {str(error).splitlines()[0]}"
    return FileErasure(str(path), problem=problem)


def _erase_lines(path: Path, person: Person, dry_run: bool) -> FileErasure:
    removed = left = unreadable = 0
    for _, row in with_progress(_lines(path), f"looking through {path.name}"):
        is_theirs = row is not None and person.owns(row)
        removed, left, unreadable = removed + is_theirs, left + (not is_theirs), unreadable + (row is None)
    if removed and not dry_run:
        with _replacing(path) as file:
            rows = with_progress(_lines(path), f"writing {path.name}")
            file.writelines(line for line, row in rows if row is None or not person.owns(row))
    problem = f"{unreadable} lines are not exported rows and were left unchanged" if unreadable else None
    return FileErasure(str(path), removed, left, problem)


def _lines(path: Path) -> Iterator[tuple[bytes, Mapping[str, Any] | None]]:
    with path.open("rb") as file:
        for line in file:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            yield line, row if isinstance(row, dict) else None


def _erase_parquet(path: Path, person: Person, dry_run: bool) -> FileErasure:
    import pyarrow
    import pyarrow.parquet

    with path.open("rb") as source, pyarrow.parquet.ParquetFile(source) as file:
        columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
        numbers = with_progress(range(file.num_row_groups), f"looking through {path.name}", step=1)
        groups = (file.read_row_group(number, columns=columns) for number in numbers)
        keep = [[not person.owns(row) for row in group.to_pylist()] for group in groups]
        removed = sum(row is False for group in keep for row in group)
        if removed and not dry_run:
            with _replacing(path) as draft:
                written = with_progress(keep, f"writing {path.name}", step=1)
                _write_parquet(file, draft, written, filter_of=lambda rows: pyarrow.array(rows, pyarrow.bool_()))
    return FileErasure(str(path), removed, sum(map(len, keep)) - removed)


def _write_parquet(
    file: Any, draft: BinaryIO, keep: Iterable[Sequence[bool]], *, filter_of: Callable[[Sequence[bool]], Any]
) -> None:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(draft, file.schema_arrow, compression="zstd") as writer:
        for number, rows in enumerate(keep):
            writer.write_table(file.read_row_group(number).filter(filter_of(rows)))


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside it, which takes its place when all went well."""
    draft = DraftFile(path)
    try:
        yield draft.file
        os.fchmod(draft.file.fileno(), stat.S_IMODE(path.stat().st_mode))
        draft.publish()
    finally:
        draft.discard()
