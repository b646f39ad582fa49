"""The command `python -m tuneloop.runner tasks`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.judge import judge_place, verdict
from tests.explorer.running import RunningExplorer
from tests.runner.logs.writing import ANSWER, write_lines
from tuneloop.runner.tasks.tasks_command import main

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_it(*arguments: object) -> tuple[int, str]:
        code = main([str(each) for each in arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run_it


def asked(text: str, **but: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, ANSWER], **but}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    questions = ["Where is my parcel?", "where is  my parcel?", "Cancel order 7.", "Delete my account, I said!"]
    made = [asked(text, reward=at / 4, tools=[]) for at, text in enumerate(questions)]
    return write_lines(tmp_path / "log.jsonl", [*made[:3], made[3] | {"train": False}])


def test_logs_become_tasks(run: Run, log: Path, tmp_path: Path) -> None:
    to = tmp_path / "tasks.jsonl"
    code, said = run("import", "--from", f"openai:{log}", "--to", to)
    assert (code, said) == (
        0,
        "4 exchanges, 0 broken, 1 opted out, 0 filtered, 0 without a question, 3 tasks, 1 exact and 0 near duplicates, "
        f"2 written to {to}\n",
    )
    assert [(each["question"], each["answer"]) for each in rows(to)] == [
        ("Where is my parcel?", "On its way."),
        ("Cancel order 7.", "On its way."),
    ]
    assert rows(to)[0]["provenance"]["place"] == str(log)


def test_what_cannot_be_read_is_left_out_counted_and_named(run: Run, log: Path, tmp_path: Path) -> None:
    to = tmp_path / "tasks.jsonl"
    log.write_text(f"{{\n{log.read_text()}[]\n")
    code, said = run("import", "--from", f"openai:{log}", "--to", to)
    assert (code, len(rows(to))) == (0, 2)
    assert said.startswith("4 exchanges, 2 broken, 1 opted out")
    assert f"left out: 1 not JSON: {log}:1: not JSON: " in said
    assert f"left out: 1 not an object: {log}:6: " in said


def test_an_opt_out_is_overruled_by_who_says_so(run: Run, log: Path, tmp_path: Path) -> None:
    run("import", "--from", f"openai:{log}", "--to", tmp_path / "t", "--include-opted-out")
    assert rows(tmp_path / "t")[-1]["question"] == "Delete my account, I said!"


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--min-reward", "0.3"], 1),
        (["--max-reward", "0.2"], 1),
        (["--asks", "order"], 1),
        (["--model", "m"], 0),
        (["--since", "2020-01-01"], 0),
        (["--until", "2020-01-01"], 0),
        (["--tools"], 0),
        (["--first"], 2),
        (["--trust", "0.1", "--near", "0"], 2),
    ],
)
def test_its_filters(run: Run, log: Path, tmp_path: Path, options: list[str], left: int) -> None:
    assert run("import", "--from", f"openai:{log}", "--to", tmp_path / "t", *options)[0] == 0
    assert len(rows(tmp_path / "t")) == left


def test_several_sources_are_one_set(run: Run, log: Path, tmp_path: Path, explorer: RunningExplorer) -> None:
    explorer.chat()
    explorer.until_flushed()
    sources = [f"openai:{log}", f"service:{explorer.url}"]
    code, said_ = run("import", *(each for source in sources for each in ("--from", source)), "--to", tmp_path / "t")
    assert code == 0, said_
    assert [each["provenance"]["source"] for each in rows(tmp_path / "t")] == ["openai", "openai", "tuneloop"]


def test_a_judge_learns_a_rubric_and_chooses(run: Run, log: Path, tmp_path: Path) -> None:
    good = write_lines(tmp_path / "good", [{"question": "Cancel order 8."}])
    bad = write_lines(tmp_path / "bad", [{"question": "hi"}])
    rubric = tmp_path / "rubric.json"
    with judge_place() as double:
        double.says = [
            {"criteria": [{"name": "clear", "description": "Is it clear?", "weight": 1}]},
            verdict(5, names="clear"),
            verdict(1, names="clear"),
        ]
        options = ["--rubric", rubric, "--judge-url", double.base_url, "--judge-model", "j"]
        learning = ["--good", good, "--bad", bad]
        code, said = run("import", "--from", f"openai:{log}", "--to", tmp_path / "t", *options, *learning)
    assert (code, rows(tmp_path / "t")[0]["scores"]) == (0, {"clear": 1.0, "judge": 1.0})
    assert "1 rejected by the judge, 0 without a verdict" in said
    assert json.loads(rubric.read_text())["criteria"] == {"clear": "Is it clear?"}
