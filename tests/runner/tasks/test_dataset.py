"""Datasets of tasks: their files, splits and orders, and what is said of those that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest

from tuneloop.runner.errors import DatasetRefused
from tuneloop.runner.tasks.dataset import DatasetConfig

ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(20)]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "my_dataset"
    found.mkdir()
    (found / "train.jsonl").write_text(lines(ROWS))
    (found / "test.jsonl").write_text(lines(ROWS[:3]))
    return found


def test_a_folder_with_a_file_for_each_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert DatasetConfig(path=str(folder), split="train").preview(n=2) == ROWS[:2]
    assert json.loads(capsys.readouterr().out) == ROWS[:2]
    assert DatasetConfig(str(folder)).tasks() == ROWS
    assert DatasetConfig(str(folder), split="test").tasks() == ROWS[:3]
    assert DatasetConfig(str(folder), split="train[:5]").tasks() == ROWS[:5]
    assert DatasetConfig(str(folder), split="train[50%:]").tasks() == ROWS[10:]
    assert DatasetConfig(str(folder / "test.jsonl")).tasks() == ROWS[:3]


def test_json_csv_and_tsv(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "in_an_object.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    (tmp_path / "lines.json").write_text(lines(ROWS))
    (tmp_path / "rows.csv").write_text(
        "\ufeffquestion,answer\r\n" + "".join(f'"{r["question"]}",{r["answer"]}\r\n' for r in ROWS)
    )
    (tmp_path / "rows.tsv").write_text(
        "question\tanswer\n" + "".join(f"{r['question']}\t{r['answer']}\n" for r in ROWS)
    )
    for file in tmp_path.iterdir():
        assert DatasetConfig(str(file)).tasks() == ROWS, file


def test_folders_of_files(tmp_path: Path) -> None:
    for split, rows in (("train", ROWS), ("validation", ROWS[:4])):
        for number in range(2):
            file = tmp_path / "data" / f"{split}-0000{number}-of-00002.jsonl"
            file.parent.mkdir(exist_ok=True)
            file.write_text(lines(rows[number * len(rows) // 2 : (number + 1) * len(rows) // 2]))
    assert DatasetConfig(str(tmp_path)).tasks() == ROWS
    assert DatasetConfig(str(tmp_path), split="validation").tasks() == ROWS[:4]
    assert len(DatasetConfig(str(tmp_path), split=None).tasks()) == 24
    named = tmp_path / "named" / "main" / "train"
    named.mkdir(parents=True)
    (named / "anything.jsonl").write_text(lines(ROWS[:7]))
    assert DatasetConfig(str(tmp_path / "named"), name="main").tasks() == ROWS[:7]
    with pytest.raises(DatasetRefused, match="there is no 'socratic' in it; there is: main"):
        DatasetConfig(str(tmp_path / "named"), name="socratic").tasks()


def test_one_file_of_another_name_is_for_training(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(lines(ROWS))
    assert DatasetConfig(str(tmp_path)).tasks() == ROWS


def test_parquet_arrow_and_what_save_to_disk_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(str(tmp_path / "parquet" / "train-00000-of-00001.parquet"))
    assert DatasetConfig(str(tmp_path / "parquet")).tasks() == ROWS
    assert DatasetConfig(str(tmp_path / "parquet"), split="train[-2:]").tasks() == ROWS[-2:]
    dataset.save_to_disk(str(tmp_path / "saved"))
    assert DatasetConfig(str(tmp_path / "saved")).tasks() == ROWS
    [arrow] = (tmp_path / "saved").glob("*.arrow")
    assert DatasetConfig(str(arrow)).tasks() == ROWS
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(3))}).save_to_disk(str(tmp_path / "dict"))
    assert DatasetConfig(str(tmp_path / "dict"), split="test").tasks() == ROWS[:3]
    with pytest.raises(DatasetRefused, match="there is no split 'dev'; there are: test, train"):
        DatasetConfig(str(tmp_path / "dict"), split="dev").tasks()


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n\n")
    for read in (DatasetConfig(str(tmp_path)).tasks, DatasetConfig(str(tmp_path)).preview):
        with pytest.raises(DatasetRefused, match="split 'train': there is no task in it"):
            read()
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DatasetRefused, match="there is no file of tasks in it"):
        DatasetConfig(str(tmp_path)).tasks()


def test_a_broken_line_is_named(folder: Path) -> None:
    file = folder / "train.jsonl"
    for broken, why in (('{"question": ', "this is not JSON"), ("[1]", "a task must be an object, not list")):
        text = lines(ROWS).splitlines()
        text[16] = broken
        file.write_text("\n".join(text))
        with pytest.raises(DatasetRefused, match=f"train.jsonl:17: {why}"):
            DatasetConfig(str(folder)).tasks()
        assert DatasetConfig(str(folder)).preview(n=16) == ROWS[:16]
    file.write_bytes(lines(ROWS[:16]).encode() + b'{"question": "\xff"}\n')
    with pytest.raises(DatasetRefused, match=r"train\.jsonl:17: this is not UTF-8"):
        DatasetConfig(str(folder)).tasks()
    table = folder / "table.csv"
    table.write_text("a,b\n" + "1,2\n" * 15 + "1,2,3\n")
    with pytest.raises(DatasetRefused, match=r"table\.csv:17: 3 columns; the header has 2"):
        DatasetConfig(str(table)).tasks()
    whole = folder / "whole.json"
    whole.write_text("[\n" + "{},\n" * 15 + "{,\n]")
    with pytest.raises(DatasetRefused, match=r"whole\.json:17: this is not JSON"):
        DatasetConfig(str(whole)).tasks()
