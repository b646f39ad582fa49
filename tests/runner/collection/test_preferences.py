"""Somebody chooses between two answers."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.running import RunningExplorer
from tests.runner.logs.writing import write_lines
from tuneloop.runner import HumanPreferenceCollector, LogRefused, ServiceRefused
from tuneloop.runner.collection.preferences import (
    HumanPreference,
    append_line,
    arrange,
    main,
    read_pairs,
    read_preferences,
)

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


def test_long_conversations_are_compared_whole(answering: RunningExplorer) -> None:
    turns = [{"role": ("user", "assistant")[at % 2], "content": str(at)} for at in range(102)]
    ends = [[*turns, {"role": "user", "content": end}] for end in ("3+4=", "3+4=", "9+9=")]
    ids = [answering.chat(messages=each).json()["id"] for each in ends]
    answering.until_flushed()
    collector = HumanPreferenceCollector(answering.url)
    assert list(collector.pair_of(ids[0], ids[1]).messages) == ends[0]
    with pytest.raises(ServiceRefused, match="the same question"):
        collector.pair_of(ids[0], ids[2])
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
    assert (tmp_path / "said.jsonl.pairs").read_text().startswith(pairs)
    assert len(answering.exchanges()) == count + 2, "nothing is sampled again"
    assert len(preferences(answering)) == 2
    chosen = read_preferences(tmp_path / "said.jsonl").values()
    assert [(each.choice, each.sent) for each in chosen] == [("left", True), ("tie", False), ("right", True)]


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


def test_a_question_is_put_before_the_next_is_answered(answering: RunningExplorer, command: list[str]) -> None:
    counts = []

    def ask(prompt: str) -> str:
        answering.until_flushed()
        counts.append(len(answering.exchanges()))
        return "s" if len(counts) < 3 else "q"

    before = len(answering.exchanges())
    assert main(command, ask=ask) == 0
    assert counts == [before + 2, before + 4, before + 6]


def test_two_people_choose_of_the_same_pairs(
    answering: RunningExplorer, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command, ask=typing("1", "1", "s", "t")) == 0
    command[command.index("ann")] = "bob"
    assert main(command, ask=typing("1", "t", "q")) == 0
    assert capsys.readouterr().out.endswith("1 preferences, 1 ties, 0 skipped, 2 left\n")
    rows = preferences(answering)
    assert [source for _, _, source in rows] == ["ann", "ann", "bob"]
    assert rows[0][:2] == rows[2][:2]


def test_other_versions_answer_the_same_questions(
    answering: RunningExplorer, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command, ask=typing(*"ssss")) == 0
    command[command.index("--versions") + 1] = "1"
    count = len(answering.exchanges())
    assert main(command, ask=typing()) == 0
    answering.until_flushed()
    assert len(answering.exchanges()) == count + 8
    assert capsys.readouterr().out.endswith("0 preferences, 4 ties, 4 skipped, 0 left\n")


def test_what_was_chosen_while_the_service_was_away_is_sent_later(
    answering: RunningExplorer, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--only-pairs"]) == 0
    away = [*command, "--service", "http://127.0.0.1:9"]
    assert main(away, ask=typing("1")) == 1
    assert "said.jsonl, and sent when the command goes on" in capsys.readouterr().err
    assert main(command, ask=typing("q")) == 0
    assert "1 preferences, 0 ties, 0 skipped, 3 left" in capsys.readouterr().out
    assert len(preferences(answering)) == 1


def test_what_was_sent_before_a_crash_counts_once(
    answering: RunningExplorer, command: list[str], tmp_path: Path
) -> None:
    assert main(command, ask=typing("1", "q")) == 0
    said = tmp_path / "said.jsonl"
    chosen, sent = said.read_bytes().splitlines(keepends=True)
    for written in (chosen, chosen + sent[:1], chosen + sent[:-9]):
        said.write_bytes(written)
        assert main(command, ask=typing("q")) == 0
        assert [each.sent for each in read_preferences(said).values()] == [True]
    assert len(preferences(answering)) == 1


def test_what_the_service_never_takes_stops_nobody(
    answering: RunningExplorer, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = arrange([{"role": "user", "content": "?"}], ("A", "chatcmpl-no", "0"), ("B", "chatcmpl-other", "1"))
    write_lines(tmp_path / "said.jsonl.pairs", [pair.to_dict()])
    assert main(command, ask=typing("1", "1", "q")) == 1
    read = capsys.readouterr()
    assert "not taken: chatcmpl-" in read.err
    assert "2 preferences, 0 ties, 0 skipped, 3 left" in read.out
    assert len(preferences(answering)) == 1


def test_answers_cannot_command_the_terminal(
    answering: RunningExplorer, doubles: list[EngineDouble], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for each in doubles:
        each.says["global_step_1"] = "\x1b]0;mine\x07\x1b[2Jgone\r\n--- 2\n\u202eolleh"
    assert main(command, ask=typing("q")) == 0
    out = capsys.readouterr().out
    assert r"\x1b[2Jgone" in out
    assert r"\u202eolleh" in out
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(out)
    assert out.count("\n--- 2\n") == 1


INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever starts the tests in the background ignores it
from tuneloop.runner.collection.preferences import main
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_while_an_answer_is_awaited_is_no_traceback(tmp_path: Path) -> None:
    questions = write_lines(tmp_path / "questions.jsonl", [{"question": "3+4="}])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(300)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        options = ["--service", url, "--to", tmp_path / "x", "--questions", questions, "--source", "ann"]
        command = [sys.executable, "-c", INTERRUPTIBLE, *options, "--model", "m", "--versions", "0", "1"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = server.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                _, err = process.communicate()
    assert process.returncode == 130
    assert err.strip() == f"stopped: what was chosen is in {tmp_path / 'x'}, and the same command goes on"


def test_a_user_without_a_name_is_asked_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)
    with pytest.raises(SystemExit, match="2"):
        main(["--service", "http://127.0.0.1:9", "--to", str(tmp_path / "x")])
    assert "--source: the system has no name" in capsys.readouterr().err


# Its files.


PAIR = arrange(ASKED, ("A", "id-a", "0"), ("B", "id-b", "1"))
CHOICE_ROW = {"pair_id": "p", "choice": "tie"}
CHOICE = HumanPreference(pair_id=PAIR.pair_id, choice="left", preferred="é", rejected="id-b", source="ann")


def test_a_last_line_that_was_cut_off_was_never_written(tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    append_line(file, CHOICE)
    assert file.stat().st_mode & 0o777 == 0o600
    whole = file.read_bytes()
    append_line(file, replace(CHOICE, source="bob"))
    longer = file.read_bytes()
    for end in range(len(whole), len(longer) - 1):
        file.write_bytes(longer[:end])
        assert read_preferences(file) == {(PAIR.pair_id, "ann"): CHOICE}
        append_line(file, replace(CHOICE, source="eve"))
        assert [source for _, source in read_preferences(file)] == ["ann", "eve"]
    file.write_bytes(longer[:-1])
    append_line(file, replace(CHOICE, source="eve"))
    assert [source for _, source in read_preferences(file)] == ["ann", "bob", "eve"]


def test_pairs_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "pairs"
    assert list(read_pairs(file)) == []
    append_line(file, PAIR)
    with file.open("ab") as torn:
        torn.write(file.read_bytes()[:-20])
    assert list(read_pairs(file)) == [PAIR]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"pair_id": "p", "choice": "left", "colour": "red"}, "'colour' is none of choice, pair_id"),
        ({"choice": "left"}, "it needs a pair_id"),
        ({"pair_id": "p", "choice": "both"}, "a choice of left, right, tie, skip"),
        ({"pair_id": "p", "choice": ["left"]}, "a choice of left"),
        ({"pair_id": "p", "choice": "left", "source": {}}, "not a preference"),
        ([], "a line must be a JSON object"),
    ],
)
def test_a_line_that_is_no_preference_is_named(tmp_path: Path, row: Any, words: str) -> None:
    file = write_lines(tmp_path / "said.jsonl", [CHOICE_ROW, row])
    with pytest.raises(LogRefused, match=re.escape(words)) as caught:
        read_preferences(file)
    assert str(caught.value).startswith(f"{file}:2: ")


@pytest.mark.parametrize(("options", "words"), [([], "name --questions"), (["--model", "t"], "name --questions")])
def test_what_is_refused_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["--service", "http://127.0.0.1:9", "--to", str(tmp_path / "x"), *options]) == 1
    assert words in capsys.readouterr().err
