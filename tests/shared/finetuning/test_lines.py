"""The lines of files that jobs learn from: what is right is read, what is wrong is named by its line."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tuneloop.shared.errors import FileRefused
from tuneloop.shared.finetuning.lines import MAX_LINE_BYTES, check_file, read_lines

USER, ANSWER = {"role": "user", "content": "3+4="}, {"role": "assistant", "content": "7"}
GOOD: dict[str, Any] = {"messages": [USER, ANSWER]}
PAIR: dict[str, Any] = {
    "input": {"messages": [USER]},
    "preferred_output": [ANSWER],
    "non_preferred_output": [{"role": "assistant", "content": "8"}],
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def written(tmp_path: Path, *lines: Any) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"".join(each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n" for each in lines))
    return file


def mistake(tmp_path: Path, line: Any, method: str = "supervised") -> str:
    good = PAIR if method == "dpo" else {"messages": [USER]} if method == "reinforcement" else GOOD
    line = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
    [found] = check_file(written(tmp_path, *[good] * 15, b"   \n", line, good), method).mistakes
    assert found.number == 17
    return found.message


def test_openais_own_examples_are_read(tmp_path: Path) -> None:
    tool = {"role": "tool", "tool_call_id": "c1", "content": "7"}
    parts = {"role": "user", "content": [{"type": "text", "text": "3+4="}]}
    lines = [
        GOOD,
        {"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}]},
        {"messages": [parts, CALLS], "tools": TOOLS, "parallel_tool_calls": False},
        {"messages": [{"role": "developer", "content": "Add."}, USER, CALLS, tool, ANSWER], "tools": TOOLS},
    ]
    found = list(read_lines(written(tmp_path, *lines), "supervised"))
    assert [each.number for each in found] == [1, 2, 3, 4]
    assert found[1].messages == lines[1]["messages"]
    assert (found[2].tools, found[0].tools) == (TOOLS, None)


def test_pairs_and_prompts_are_read(tmp_path: Path) -> None:
    with_tools = {**PAIR, "input": {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": True}}
    [first, second] = read_lines(written(tmp_path, PAIR, with_tools), "dpo")
    assert (first.preferred, first.rejected, second.tools) == (ANSWER, PAIR["non_preferred_output"][0], TOOLS)
    asked = {"messages": [USER], "answer": 7, "deep": {"a": [1]}}
    [line] = read_lines(written(tmp_path, asked), "reinforcement")
    assert (line.messages, line.item) == ([USER], asked)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{oops\n", "must be a JSON object"),
        (b'["a"]\n', "must be a JSON object"),
        (b'{"messages": NaN}\n', "must be a JSON object"),
        (b'{"messages": "\xff"}\n', "not UTF-8"),
        (b'{"messages": "\\ud800"}\n', "must be a JSON object"),
        (b"[" * 3000 + b"]" * 3000 + b"\n", "nested"),
        (b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}\n", "nested more than 200"),
        (b" " * (MAX_LINE_BYTES + 10) + b"x\n", "longer than"),
        ({"prompt": "a", "completion": "b"}, "messages is missing; prompt and completion"),
        ({"messages": []}, "at least one message"),
        ({"messages": [USER]}, "none from the assistant"),
        ({"messages": [ANSWER, USER]}, "last message must be from the assistant"),
        ({"messages": [USER, ANSWER | {"weight": 0}]}, "weight 0"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "weight must be 0 or 1"),
        ({"messages": [USER, ANSWER | {"weight": True}]}, "weight must be 0 or 1"),
        ({"messages": [USER | {"weight": 1}, ANSWER]}, "messages[0].weight"),
        ({"messages": [USER | {"role": "human"}, ANSWER]}, "role must be one of"),
        ({"messages": ["hello", ANSWER]}, "messages[0] must be an object"),
        ({"messages": [USER | {"content": 3}, ANSWER]}, "content must be a string"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "content must be a string"),
        ({"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}, ANSWER]}, "image_url is not"),
        ({"messages": [USER | {"contents": "typo"}, ANSWER]}, "unknown field messages[0].contents"),
        ({"messages": [USER, ANSWER], "tool": []}, "unknown field tool"),
        ({"messages": [USER, CALLS]}, "none of the tools"),
        ({"messages": [USER, CALLS], "tools": [{"type": "web_search"}]}, "tools[0] must be of type function"),
        ({"messages": [USER, ANSWER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"messages": [{"role": "tool", "tool_call_id": "c9", "content": "7"}, ANSWER]}, "names no call"),
        (
            {"messages": [USER, CALLS | {"tool_calls": [CALL | {"function": {"name": "add", "arguments": "{"}}]}]}
            | {"tools": TOOLS},
            "arguments must be a string",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_line_17_is_named(tmp_path: Path, line: Any, words: str) -> None:
    assert words in mistake(tmp_path, line)


@pytest.mark.parametrize(
    ("line", "method", "words"),
    [
        ({**PAIR, "preferred_output": ANSWER}, "dpo", "preferred_output must be a list of one"),
        ({**PAIR, "preferred_output": [USER]}, "dpo", "preferred_output[0].role must be assistant"),
        ({**PAIR, "non_preferred_output": [ANSWER]}, "dpo", "are the same"),
        ({**PAIR, "input": [USER]}, "dpo", "input must be an object"),
        ({**PAIR, "input": {"messages": [USER, ANSWER]}}, "dpo", "must not be from the assistant"),
        (GOOD, "dpo", "unknown field messages"),
        (GOOD, "reinforcement", "must not be from the assistant"),
        ({"prompt": 1}, "reinforcement", "messages is missing"),
    ],
)
def test_lines_of_other_methods_are_named(tmp_path: Path, line: Any, method: str, words: str) -> None:
    assert words in mistake(tmp_path, line, method)


@pytest.mark.parametrize("data", [b"", b"\n \n\r\n"])
def test_an_empty_file_is_a_mistake(tmp_path: Path, data: bytes) -> None:
    assert "empty" in check_file(written(tmp_path, data), "supervised").mistakes[0].message


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\xff\xfe"])
def test_a_byte_order_mark_is_a_mistake(tmp_path: Path, mark: bytes) -> None:
    [found] = check_file(written(tmp_path, mark, GOOD), "supervised").mistakes
    assert found.number == 1
    assert "byte order mark" in found.message


def test_reading_ends_at_the_first_mistake_and_checking_after_some(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD, *[b"{\n"] * 30)
    with pytest.raises(FileRefused, match="line 2: every line"):
        list(read_lines(file, "supervised"))
    assert [each.number for each in check_file(file, "supervised", most=5).mistakes] == [2, 3, 4, 5, 6]
    assert len(check_file(file, "supervised").mistakes) == 20
    with pytest.raises(FileRefused, match="cannot be read"):
        check_file(tmp_path / "none", "supervised")
    with pytest.raises(FileRefused, match="no method"):
        check_file(file, "ppo")


def test_the_last_line_may_end_without_a_newline(tmp_path: Path) -> None:
    assert check_file(written(tmp_path, GOOD, json.dumps(GOOD).encode()), "supervised") == (2, [])
    assert check_file(written(tmp_path, json.dumps(GOOD).encode() + b"\r\n", GOOD), "supervised") == (2, [])


def test_a_file_that_is_one_huge_line_is_not_read_into_memory(tmp_path: Path) -> None:
    file = tmp_path / "huge"
    with file.open("wb") as sparse:
        sparse.truncate(256 << 20)
    tracemalloc.start()
    try:
        assert "longer than" in check_file(file, "supervised").mistakes[0].message
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
