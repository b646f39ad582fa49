"""Exchanges of OpenAI's formats."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runner.logs.writing import ANSWER, CALL, TOOLS, USER, write_lines
from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.exchange import LoggedExchange
from tuneloop.runner.logs.request_logs import read_openai_jsonl

COMPLETION = {"id": "chatcmpl-1", "model": "m", "created": 5, "choices": [{"message": ANSWER}]}
REQUEST = {"model": "m", "messages": [USER], "tools": TOOLS, "user": "ann"}


def read(folder: Path, *rows: Any) -> list[LoggedExchange]:
    return list(read_openai_jsonl(write_lines(folder / "log.jsonl", rows)))


def test_an_example_to_fine_tune_with_has_the_answer_that_is_wanted(tmp_path: Path) -> None:
    [exchange] = read(tmp_path, {"messages": [USER, ANSWER], "tools": TOOLS})
    assert (exchange.messages, exchange.reply, exchange.target) == ((USER,), (ANSWER,), True)
    assert list(exchange.tools) == TOOLS
    again = read(tmp_path, {"messages": [USER]}, {"messages": [USER, ANSWER], "tools": TOOLS})[1]
    assert exchange.exchange_id == again.exchange_id, "what names no id is named by its words"


@pytest.mark.parametrize(
    "row",
    [
        {"request": REQUEST, "response": COMPLETION},
        {"request": json.dumps(REQUEST), "response": json.dumps(COMPLETION)},
        {"custom_id": "x", "body": REQUEST, "response": {"status_code": 200, "body": COMPLETION}},
        {"input": {"body": REQUEST}, "output": COMPLETION},
        REQUEST | COMPLETION,
    ],
)
def test_a_logged_call_is_what_a_model_said(tmp_path: Path, row: dict[str, Any]) -> None:
    [exchange] = read(tmp_path, row)
    assert (exchange.messages, exchange.reply, exchange.target) == ((USER,), (ANSWER,), False)
    assert (exchange.exchange_id, exchange.model, exchange.user) == ("chatcmpl-1", "m", "ann")


def test_a_request_that_got_no_answer_is_one_all_the_same(tmp_path: Path) -> None:
    [exchange] = read(tmp_path, {"request": REQUEST, "response": {"error": "overloaded"}})
    assert (exchange.messages, exchange.reply) == ((USER,), ())


def test_calls_of_a_run_belong_together(tmp_path: Path) -> None:
    of_run = {"metadata": {"tuneloop_task_id": "t", "run_id": 3}}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    read_ = read(tmp_path, REQUEST | of_run, {"messages": [USER, called], **of_run})
    assert [each.conversation for each in read_] == ["t/3", "t/3"]
    assert read_[0].labels == {"task_id": "t", "run_id": "3"}


@pytest.mark.parametrize(
    "said",
    [{"train": False}, {"metadata": {"train": "false"}}, {"metadata": {"tuneloop_train": False}}, {"store": False}],
)
def test_an_opt_out_is_seen(tmp_path: Path, said: dict[str, Any]) -> None:
    rows = [{"messages": [USER, ANSWER], **said}, {"request": REQUEST | said, "response": COMPLETION}]
    assert [each.train for each in read(tmp_path, *rows)] == [False, False]


@pytest.mark.parametrize(
    "line", ["{", "[1]", "{}", '{"messages": []}', '{"messages": [5]}', '{"messages": [{"a": 1}]}']
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "log.jsonl", [{"messages": [USER, ANSWER]}])
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(LogRefused, match=r"log\.jsonl:3: "):
        list(read_openai_jsonl(path))
    with pytest.raises(LogRefused, match="away"):
        list(read_openai_jsonl(tmp_path / "away"))
