"""An erased person's rows in exported files."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.data.exporting import erased_during
from tuneloop.cli.erasure import FileErasure, Person, erase_rows
from tuneloop.cli.files import DraftFile

ANN = Person("acme", ("ann",), frozenset({"m1"}))

THEIRS: list[dict[str, Any]] = [
    {"msg_id": "m1"},
    {"msg_id": "m9", "other_msg_id": "m1"},
    {"msg_id": "m9", "user": "ann"},
    {"msg_id": "m9", "user": "bob", "other_user": "ann"},
    {"msg_id": "m9", "feedback_sources": ["bob", "ann"]},
    {"msg_id": "m9", "tenant": "acme", "user": "ann"},
    {"msg_id": "m9", "feedback": [{"source": "bob"}, {"source": "ann"}]},
    {"msg_id": "m9", "feedback": [{"other_msg_id": "m1"}]},
]
OTHERS: list[dict[str, Any]] = [
    {"msg_id": "m9"},
    {"msg_id": "m9", "user": "bob", "other_user": None, "feedback_sources": ["bob"], "feedback": [{"source": "bob"}]},
    {"msg_id": "m9", "tenant": "other", "user": "ann"},
    {"msg_id": "m9", "messages": [{"role": "user", "content": "ann"}]},
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("row", THEIRS, ids=str)
def test_a_row_that_holds_something_of_theirs_is_known(row: dict[str, Any]) -> None:
    assert ANN.owns(row)


@pytest.mark.parametrize("row", OTHERS, ids=str)
def test_a_row_of_others_is_not(row: dict[str, Any]) -> None:
    assert not ANN.owns(row)


def test_their_lines_are_taken_out_and_the_others_stay_as_they_were(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [*OTHERS, *THEIRS, OTHERS[0]])
    path.chmod(0o640)
    assert erase_rows(str(path), ANN, dry_run=True) == FileErasure(str(path), 8, 5)
    assert len(read_lines(path)) == 13
    assert erase_rows(str(path), ANN) == FileErasure(str(path), 8, 5)
    assert read_lines(path) == [*OTHERS, OTHERS[0]]
    assert path.stat().st_mode & 0o777 == 0o640
    assert erase_rows(str(path), ANN) == FileErasure(str(path), 0, 5)
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


def test_lines_that_cannot_be_read_stay_and_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'nonsense ann\n{"msg_id": "m1"}\n[1]\n')
    assert erase_rows(str(path), ANN) == FileErasure(
        str(path), 1, 2, "2 lines are not exported rows and were left unchanged"
    )
    assert path.read_bytes() == b"nonsense ann\n[1]\n"


def test_their_rows_are_taken_out_of_parquet_group_by_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    event = pa.struct([("source", pa.string()), ("text", pa.string())])
    columns = [
        ("msg_id", pa.string()),
        ("user", pa.string()),
        ("feedback", pa.list_(event)),
        ("ids", pa.list_(pa.int32())),
    ]
    schema = pa.schema(columns, metadata={"written": "by us"})
    people = ["ann", "bob", None, "ann", "ann", "ann", "bob"]
    rows = [{"msg_id": f"x{i}", "user": who, "feedback": [], "ids": [i]} for i, who in enumerate(people)]
    rows[1]["feedback"] = [{"source": "ann", "text": "canary"}]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=2)
    before = pq.read_table(path).schema
    assert erase_rows(str(path), ANN, dry_run=True) == erase_rows(str(path), ANN) == FileErasure(str(path), 5, 2)
    left = pq.read_table(path)
    assert left.to_pylist() == [rows[2], rows[6]]
    assert left.schema.equals(before, check_metadata=True)
    assert b"canary" not in path.read_bytes()


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("gone.jsonl", None, "No such file or directory"),
        ("gone.parquet", None, "No such file or directory"),
        ("bad.parquet", b"nonsense", "cannot be read: "),
        ("bad.parquet", b"", "cannot be read: "),
    ],
)
def test_what_cannot_be_reached_is_told(tmp_path: Path, name: str, data: bytes | None, problem: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    done = erase_rows(str(tmp_path / name), ANN)
    assert (done.removed, done.left) == (0, 0)
    assert (done.problem or "").startswith(problem)
    assert "\n" not in (done.problem or "")


@pytest.mark.parametrize(("suffix", "stop_at"), [("jsonl", 4), ("parquet", 1)])
def test_two_people_who_are_erased_at_once_are_both_gone(tmp_path: Path, suffix: str, stop_at: int) -> None:
    path, rows = tmp_path / f"a.{suffix}", [{"user": user} for user in ("ann", "bob", "carol")]
    if suffix == "jsonl":
        write_lines(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    bob = Person("acme", ("bob",), frozenset())
    done = erased_during(lambda: erase_rows(str(path), bob), path, "ann", stop_at=stop_at)
    assert [each.removed for each in done] == [1, 1]
    left = read_lines(path) if suffix == "jsonl" else pq.read_table(path).to_pylist()
    assert left == [{"user": "carol"}]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_drafts_that_were_left_go_with_their_rows(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", OTHERS)
    left = tmp_path / ".a.jsonl.4711.partial"
    others = [tmp_path / name for name in (".b.jsonl.4711.partial", ".a.jsonl.mine.partial")]
    for each in (left, *others):
        write_lines(each, THEIRS)
    assert erase_rows(str(path), ANN, dry_run=True).problem is None
    assert left.exists()
    assert erase_rows(str(path), ANN).problem is None
    assert (left.exists(), [each.exists() for each in others]) == (False, [True, True])


def test_a_draft_that_is_being_written_stays(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", OTHERS)
    draft = DraftFile(path)
    draft.file.write(b"{}")
    assert erase_rows(str(path), ANN) == FileErasure(str(path), 0, len(OTHERS))
    draft.publish()
    draft.discard()
    assert (path.read_bytes(), [each.name for each in tmp_path.iterdir()]) == (b"{}", ["a.jsonl"])
