"""Somebody chooses between two answers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.running import RunningExplorer
from tests.runner.logs.writing import write_lines
from tuneloop.runner import HumanPreferenceCollector, ServiceRefused
from tuneloop.runner.collection.blind_pairs import arrange, read_pairs
from tuneloop.runner.collection.prefer_command import main

ASKED = [{"role": "user", "content": "3+4="}]
NEW = "Seven, of course."


@pytest.fixture
def answering(trying: RunningExplorer, doubles: list[EngineDouble]) -> RunningExplorer:
    """Version 1 says something else than version 0."""
    for each in doubles:
        each.says["global_step_1"] = NEW
    return trying


def preferences(explorer: RunningExplorer) -> list[tuple[str, str, str]]:
    explorer.until_flushed()
    return explorer.rows("SELECT msg_id, other_msg_id, source FROM feedback WHERE kind = 'preference'")


def test_the_order_is_blind_random_and_the_same_again() -> None:
    a, b = ("A", "id-a", "0"), ("B", "id-b", "1")
    pairs = [arrange([{"role": "user", "content": str(at)}], a, b) for at in range(100)]
    assert 30 < sum(each.texts == ("A", "B") for each in pairs) < 70
    assert all((each.texts == ("A", "B")) == (each.ids == ("id-a", "id-b")) for each in pairs)
    assert pairs == [arrange([{"role": "user", "content": str(at)}], a, b) for at in range(100)]
    assert pairs != [arrange([{"role": "user", "content": str(at)}], a, b, seed=1) for at in range(100)]
    shown = json.dumps(pairs[0].page)
    assert "id-a" not in shown
    assert "versions" not in shown


@pytest.mark.parametrize("choice", ["left", "right"])
def test_a_choice_is_a_preference_of_the_service(answering: RunningExplorer, choice: Any) -> None:
    collector = HumanPreferenceCollector(answering.url, source="ann")
    pair = collector.sample(ASKED, MODEL, (0, 1), max_tokens=12)
    assert NEW in pair.texts
    assert pair.versions is not None
    assert sorted(pair.versions) == ["0", "1"]
    said = collector.record(pair, choice)
    again = collector.record(pair, choice)
    collector.close()
    assert said == again
    assert said.sent
    assert pair.ids is not None
    better = 0 if choice == "left" else 1
    assert preferences(answering) == [(pair.ids[better], pair.ids[1 - better], "ann")]


def test_ties_and_skips_are_not_sent(answering: RunningExplorer) -> None:
    collector = HumanPreferenceCollector(answering.url)
    pair = collector.sample(ASKED, MODEL, (0, 1), max_tokens=12)
    assert [collector.record(pair, choice).sent for choice in ("tie", "skip")] == [False, False]
    with pytest.raises(ValueError, match="choice: 'both'"):
        collector.record(pair, "both")  # type: ignore[arg-type]
    collector.close()
    assert preferences(answering) == []


def test_stored_replies_are_a_pair_if_they_answer_one_question(answering: RunningExplorer) -> None:
    ids = [answering.chat(model=f"{MODEL}@{version}").json()["id"] for version in (0, 1)]
    other = answering.chat(messages=[{"role": "user", "content": "9+9="}]).json()["id"]
    answering.until_flushed()
    collector = HumanPreferenceCollector(answering.url)
    assert sorted(collector.pair_of(*ids).ids or ()) == sorted(ids)
    with pytest.raises(ServiceRefused, match="the same question"):
        collector.pair_of(ids[0], other)
    with pytest.raises(ServiceRefused, match="chatcmpl-nothing"):
        collector.pair_of(ids[0], "chatcmpl-nothing")
    collector.close()


# The command.


def typing(*answers: str) -> Callable[[str], str]:
    left: Iterator[str] = iter(answers)

    def ask(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return ask


@pytest.fixture
def command(answering: RunningExplorer, tmp_path: Path) -> list[str]:
    rows = [{"question": f"{at}+4="} for at in range(4)]
    questions = write_lines(tmp_path / "questions.jsonl", rows)
    options = {"--service": answering.url, "--to": tmp_path / "said.jsonl", "--questions": questions, "--model": MODEL}
    return [str(each) for pair in options.items() for each in pair] + ["--versions", "0", "1", "--source", "ann"]


def test_somebody_chooses_and_goes_on_later(
    answering: RunningExplorer, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command, ask=typing("nonsense", "1", "t", "q")) == 0
    said = capsys.readouterr().out
    assert "1 preferences, 1 ties, 0 skipped, 2 left" in said
    assert NEW in said
    pairs = (tmp_path / "said.jsonl.pairs").read_text()
    count = len(answering.exchanges())
    assert main(command, ask=typing("2")) == 0
    assert "2 preferences, 1 ties, 0 skipped, 1 left" in capsys.readouterr().out
    assert (tmp_path / "said.jsonl.pairs").read_text() == pairs
    assert len(answering.exchanges()) == count, "nothing is sampled again"
    assert len(preferences(answering)) == 2
    rows = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [each["choice"] for each in rows] == ["left", "tie", "right"]


def test_pairs_are_made_for_a_page(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--only-pairs"], ask=typing()) == 0
    assert "4 pairs in" in capsys.readouterr().out
    assert len(list(read_pairs(tmp_path / "said.jsonl.pairs"))) == 4


def test_answers_that_are_the_same_are_a_tie(trying: RunningExplorer, command: list[str]) -> None:
    command[command.index("--versions") + 2] = "0"
    assert main(command, ask=typing()) == 0
    assert preferences(trying) == []


def test_replies_may_be_given(answering: RunningExplorer, tmp_path: Path) -> None:
    ids = [answering.chat(model=f"{MODEL}@{version}").json()["id"] for version in (0, 1)]
    answering.until_flushed()
    replies = write_lines(tmp_path / "r.jsonl", [{"a": ids[0], "b": ids[1]}])
    options = ["--service", answering.url, "--to", str(tmp_path / "said"), "--replies", str(replies)]
    assert main(options, ask=typing("1")) == 0
    assert sorted(preferences(answering)[0][:2]) == sorted(ids)


@pytest.mark.parametrize(("options", "words"), [([], "name --questions"), (["--model", "t"], "name --questions")])
def test_what_is_refused_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["--service", "http://127.0.0.1:9", "--to", str(tmp_path / "x"), *options]) == 1
    assert words in capsys.readouterr().err
