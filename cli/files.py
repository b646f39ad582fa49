"""Files of rows, JSON lines or Parquet, written whole or not at all, and read row by row with the location of each.

pyarrow is imported only where a Parquet file is touched: it is an extra, and JSON lines do without it.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import orjson

from tuneloop.shared.errors import EnvironmentRefused, FileRefused
from tuneloop.shared.held_files import new_unlinked

_GROUP = 1000

_CONVERSATIONS = ("messages", "prompt", "chosen", "rejected", "completion")


Row = dict[str, Any]


class Format(StrEnum):
    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"
    EXPERIENCES = "experiences"


class RowLocation(NamedTuple):
    """A row of a file and its location; without a row, `error` says why it cannot be read."""

    where: str
    row: Row | None
    error: str = ""


class Draft:
    """A file that is written beside its path and renamed by `publish`. What is not published is deleted."""

    def __init__(self, path: Path, format_: Format) -> None:
        self.rows = 0
        self._path = path
        is_parquet = _is_parquet(path)
        with self._writing():
            self._draft = DraftFile(path)
            try:
                self._writer = _Groups(self._draft.file, format_) if is_parquet else _Lines(self._draft.file)
            except BaseException:
                self._draft.discard()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._writer.close()
        finally:
            self._draft.discard()

    def write(self, row: Row) -> None:
        with self._writing():
            self._writer.write(row)
        self.rows += 1

    def publish(self) -> None:
        with self._writing():
            self._writer.close()
            self._draft.publish()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FileRefused(f"{self._path}: cannot be written: {error.strerror or error}") from None


class _Lines:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, row: Row) -> None:
        # As Python's floats: only a reader that rounds once gets the same float32 from its shortest text.
        self._file.write(orjson.dumps(row, default=np.ndarray.tolist, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        self._file.flush()


class _Groups:
    """A Parquet file, with a schema of its format's and not of what happens to stand in its first rows."""

    def __init__(self, file: BinaryIO, format_: Format) -> None:
        self._arrow = _pyarrow()
        self._schema = _schema(self._arrow, format_)
        self._writer = _parquet().ParquetWriter(file, self._schema, compression="zstd")
        self._waiting: list[Row] = []

    def write(self, row: Row) -> None:
        columns = dict(row)  # values of their columns' types; what has no fixed shape becomes JSON text
        for name in _CONVERSATIONS:
            if name in row:
                columns[name] = [_as_struct(message) for message in row[name]]
        for name in ("tools", "tool_calls"):
            if row.get(name) is not None:
                columns[name] = orjson.dumps(row[name]).decode()
        self._waiting.append(columns)
        if len(self._waiting) >= _GROUP:
            self._flush()

    def close(self) -> None:
        if self._writer.is_open:
            self._flush()
            self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(self._arrow.Table.from_pylist(self._waiting, schema=self._schema))
            self._waiting.clear()


def read(path: Path, columns: frozenset[str]) -> Iterator[RowLocation]:
    """The rows of a file, of Parquet only these columns. Raises FileRefused if it is no such file."""
    try:
        yield from _read_parquet(path, columns) if _is_parquet(path) else _read_lines(path)
    except OSError as error:
        raise FileRefused(f"{path}: cannot be read: {error.strerror or error}") from None


def _read_lines(path: Path) -> Iterator[RowLocation]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                yield RowLocation(where, None, f"not JSON: {error}")
                continue
            yield RowLocation(where, row) if isinstance(row, dict) else RowLocation(where, None, "no JSON object")


def _read_parquet(path: Path, columns: frozenset[str]) -> Iterator[RowLocation]:
    arrow, parquet = _pyarrow(), _parquet()
    try:
        with parquet.ParquetFile(path) as file:
            present = [name for name in file.schema_arrow.names if name in columns]
            # One reader for all groups would keep what it has read of each.
            batches = chain.from_iterable(
                file.iter_batches(batch_size=_GROUP, row_groups=[group], columns=present)
                for group in range(file.num_row_groups)
            )
            for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1):
                yield RowLocation(f"{path}:{number}", row)
    except arrow.ArrowInvalid as error:
        raise FileRefused(f"{path}: cannot be read as Parquet: {error}") from None


def _is_parquet(path: Path) -> bool:
    if path.suffix not in {".jsonl", ".parquet"}:
        raise FileRefused(f"{path}: its name must end in .jsonl or .parquet")
    return path.suffix == ".parquet"


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise EnvironmentRefused('Parquet files need pyarrow: in a clone, pip install ./runner ".[parquet]"') from None
    return pyarrow


def _parquet() -> Any:
    import pyarrow.parquet

    return pyarrow.parquet


def _schema(pa: Any, format_: Format) -> Any:
    text, real, whole = pa.string(), pa.float64(), pa.int32()
    call = pa.struct([("id", text), ("type", text), ("function", pa.struct([("name", text), ("arguments", text)]))])
    message = [(name, text) for name in ("role", "content", "reasoning_content", "name", "tool_call_id")]
    messages = pa.list_(pa.struct([*message, ("tool_calls", pa.list_(call))]))
    names = [(name, text) for name in ("msg_id", "user", "task_id", "run_id")]
    labels = [("tools", text), *names, ("version", whole), ("feedback_sources", pa.list_(text))]
    match format_:
        case Format.SFT:
            columns = [("messages", messages), ("reward", real), *labels]
        case Format.KTO:
            columns = [("prompt", messages), ("completion", messages), ("label", pa.bool_()), *labels]
        case Format.DPO:
            answers = [(name, messages) for name in ("prompt", "chosen", "rejected")]
            other = [("other_msg_id", text), ("other_user", text), ("other_reward", real)]
            columns = [*answers, ("source", text), ("reward", real), *labels, *other]
        case Format.EXPERIENCES:
            words = ["tenant", "endpoint", "request", "text", "tool_calls", "finish_reason", "reward_rule"]
            words += ["state", "reason", "unsampled"]
            numbers = ["temperature", "reward", "sampled_at", "rewarded_at", "committed_at", "latency_s", "priority"]
            counts = ["choice", "correction", "version_min", "version_max", "trained_version"]
            event_texts = ["event_id", "call_id", "msg_id", "task_id", "run_id", "kind", "metric", "text", "source"]
            event = [
                *((name, text) for name in (*event_texts, "other_msg_id", "outcome")),
                *((name, real) for name in ("value", "received_at", "occurred_at")),
                *((name, whole) for name in ("choice", "other_choice")),
            ]
            columns = [
                *names,
                *((name, text) for name in words),
                *((name, real) for name in numbers),
                *((name, whole) for name in counts),
                ("messages", messages),
                ("prompt_ids", pa.list_(whole)),
                ("completion_ids", pa.list_(whole)),
                ("logprobs", pa.list_(pa.float32())),
                ("feedback", pa.list_(pa.struct(event))),
            ]
    return pa.schema(columns)


def _as_struct(message: Row) -> Row:
    names = ("role", "content", "reasoning_content", "name", "tool_call_id")
    calls = message.get("tool_calls")
    return {name: _as_text(message.get(name)) for name in names} | {
        "tool_calls": [_as_call(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else None
    }


def _as_call(call: Row) -> Row:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    texts = {name: _as_text(function.get(name)) for name in ("name", "arguments")}
    return {"id": _as_text(call.get("id")), "type": _as_text(call.get("type")), "function": texts}


def _as_text(value: Any) -> str | None:
    """The text; of content in parts, its parts of text, one after the other."""
    if isinstance(value, str | None):
        return value
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return orjson.dumps(value).decode()


class DraftFile:
    def __init__(self, path: Path) -> None:
        """Also deletes leftovers of earlier drafts. Raises OSError."""
        list(clear_left_drafts(path))
        self._path, self._draft = path, path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        self.file = new_unlinked(self._draft)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def publish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self._draft.replace(self._path)

    def discard(self) -> None:
        try:
            self.file.close()
        finally:
            self._draft.unlink(missing_ok=True)


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Lock the file against replacement by another `in_turn`; without a file or file-system locks, do nothing."""
    with ExitStack() as held:
        with suppress(OSError):
            while True:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(descriptor), path.stat()):  # who had it before may have replaced it
                    break
                held.close()
        yield


def clear_left_drafts(path: Path) -> Iterator[str]:
    """Delete the drafts for this path without a writer; what could not be deleted, and why."""
    named = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]+\.partial").fullmatch
    for draft in sorted(each for each in path.parent.glob(".*.partial") if named(each.name) and not each.is_symlink()):
        try:
            descriptor = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink(missing_ok=True)
            except BlockingIOError:
                pass  # an export, which begins again when a person was erased meanwhile
            finally:
                os.close(descriptor)
        except OSError as error:
            yield f"its draft {draft.name} cannot be deleted: {error.strerror or error}"
