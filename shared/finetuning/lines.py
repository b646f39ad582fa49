"""Reads and checks the lines of a fine-tuning job's JSONL file, as OpenAI's guides specify.

Reading is line by line and drops oversized lines, so memory does not depend on the file. Blank lines are skipped: an
erased line keeps the numbers of later lines.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from tuneloop.shared.errors import FileRefused

#: Bytes of the longest line, and how deep its JSON may be nested.
MAX_LINE_BYTES, MAX_DEPTH = 4 << 20, 200

#: Bytes that are looked through at once for the ends of lines.
_BLOCK = 1 << 20

METHODS = ("supervised", "dpo", "reinforcement")

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {
    "supervised": ("messages", "tools", "parallel_tool_calls"),
    "dpo": ("input", "preferred_output", "non_preferred_output"),
}
_INPUT_FIELDS = ("messages", "tools", "parallel_tool_calls")
_MESSAGE_FIELDS = ("role", "content", "name", "weight", "tool_calls", "tool_call_id", "reasoning_content", "refusal")

_BOMS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


class FileLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that is right, `number` from 1; `messages` come before the answers; `item` is the line, for graders."""

    number: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    preferred: dict[str, Any] | None = None
    rejected: dict[str, Any] | None = None
    item: dict[str, Any] = {}


class LineMistake(NamedTuple):
    number: int
    message: str


class LineIndex(NamedTuple):
    """The byte offset of each line, and the end of the last one."""

    file: Path
    places: npt.NDArray[np.int64]

    @classmethod
    def of(cls, file: Path) -> Self:
        """Raises OSError."""
        ends, at = [np.zeros(1, np.int64)], 0
        with file.open("rb") as source:
            while block := source.read(_BLOCK):
                ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + (at + 1))
                at += len(block)
        places = np.concatenate(ends)
        return cls(file, places if places[-1] == at else np.append(places, at))

    @property
    def lines(self) -> int:
        return len(self.places) - 1

    def read(self, numbers: Sequence[int], method: str) -> Iterator[FileLine]:
        """These lines, counted from 0, but for empty ones. Raises FileRefused for a mistake, OSError."""
        with self.file.open("rb") as source:
            for number in numbers:
                source.seek(self.places[number])
                line = source.read(int(self.places[number + 1] - self.places[number]))
                if line.strip():
                    yield read_line(number + 1, line, method)


class FileCheck(NamedTuple):
    lines: int
    mistakes: list[LineMistake]


class _Mistake(Exception):
    """What is wrong with the line that is being read."""


def read_lines(file: Path, method: str) -> Iterator[FileLine]:
    """The lines of a file for a method: supervised, dpo or reinforcement. Raises FileRefused at the first mistake."""
    for line in _scan(file, method):
        if isinstance(line, LineMistake):
            raise FileRefused(f"line {line.number}: {line.message}")
        yield line


def read_line(number: int, data: bytes, method: str) -> FileLine:
    try:
        return _parse(number, data if len(data.rstrip(b"\n")) <= MAX_LINE_BYTES else None, method)
    except _Mistake as mistake:
        raise FileRefused(f"line {number}: {mistake}") from None


def check_file(file: Path, method: str, *, most: int = 20) -> FileCheck:
    """Look at all lines, up to so many mistakes. Raises FileRefused for a file that cannot be read."""
    lines, mistakes = 0, list[LineMistake]()
    for line in _scan(file, method):
        lines += 1
        if isinstance(line, LineMistake):
            mistakes.append(line)
            if len(mistakes) == most:
                break
    return FileCheck(lines, mistakes)


def _scan(file: Path, method: str) -> Iterator[FileLine | LineMistake]:
    """Each line or its mistake; an empty file is one mistake."""
    if method not in METHODS:
        raise FileRefused(f"there is no method {method!r}; there are {', '.join(METHODS)}")
    is_empty = True
    try:
        with file.open("rb") as source:
            for number, data in enumerate(_split(source), 1):
                if data is not None and not data.strip():
                    continue
                is_empty = False
                try:
                    yield _parse(number, data, method)
                except _Mistake as mistake:
                    yield LineMistake(number, str(mistake))
    except OSError as error:
        raise FileRefused(f"the file cannot be read: {error.strerror}") from None
    if is_empty:
        yield LineMistake(1, "the file is empty: each line must be a JSON object")


def _split(source: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file; None for one that is too long."""
    while data := source.readline(MAX_LINE_BYTES + 1):
        if len(data) <= MAX_LINE_BYTES or data.endswith(b"\n"):
            yield data
            continue
        while data and not data.endswith(b"\n"):
            data = source.readline(MAX_LINE_BYTES)
        yield None


def _parse(number: int, data: bytes | None, method: str) -> FileLine:
    if data is None:
        raise _Mistake(f"the line is longer than {MAX_LINE_BYTES} bytes")
    if number == 1 and data.startswith(_BOMS):
        raise _Mistake("the file begins with a byte order mark: write it as UTF-8 without one")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise _Mistake(f"the line is not UTF-8: {error.reason} at byte {error.start}") from None
    begin = data[:40].decode(errors="ignore").strip()
    try:
        item = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        reason = "it is nested too deeply" if "depth limit" in error.msg else error.msg
        raise _Mistake(f"every line must be a JSON object: {reason} (the line starts with: {begin!r})") from None
    if not isinstance(item, dict):
        raise _Mistake(f"every line must be a JSON object, and this one is none (it starts with: {begin!r})")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deep(item):
        raise _Mistake(f"the line is nested more than {MAX_DEPTH} deep")
    if method == "dpo":
        return _preference(number, item)
    return _conversation(number, item, method)


def _conversation(number: int, item: dict[str, Any], method: str) -> FileLine:
    if "messages" not in item:
        hint = "; prompt and completion are for models that do not chat" if "prompt" in item else ""
        raise _Mistake(f"messages is missing{hint}")
    if method == "supervised":
        _refuse_unknown(item, _FIELDS[method], "")
    tools = _tools_of(item, "")
    messages = _messages(item["messages"], "messages", tools)
    last = messages[-1]["role"]
    if method == "reinforcement":
        if last == "assistant":
            raise _Mistake("the last message must not be from the assistant: the model answers it")
        return FileLine(number=number, messages=messages, tools=tools, item=item)
    answers = [each for each in messages if each["role"] == "assistant"]
    if not answers:
        raise _Mistake("messages has none from the assistant: there is nothing to learn")
    if last != "assistant":
        raise _Mistake(f"the last message must be from the assistant, not from {last}")
    if all(each.get("weight") == 0 for each in answers):
        raise _Mistake("all messages of the assistant have weight 0: there is nothing to learn")
    return FileLine(number=number, messages=messages, tools=tools)


def _preference(number: int, item: dict[str, Any]) -> FileLine:
    _refuse_unknown(item, _FIELDS["dpo"], "")
    asked = item.get("input")
    if not isinstance(asked, dict):
        raise _Mistake("input must be an object with messages")
    _refuse_unknown(asked, _INPUT_FIELDS, "input.")
    tools = _tools_of(asked, "input.")
    messages = _messages(asked.get("messages"), "input.messages", tools)
    if messages[-1]["role"] == "assistant":
        raise _Mistake("the last message of input.messages must not be from the assistant")
    answers = []
    for name in ("preferred_output", "non_preferred_output"):
        value = item.get(name)
        if not isinstance(value, list) or len(value) != 1:
            raise _Mistake(f"{name} must be a list of one message of the assistant")
        [answer] = _messages(value, name, tools)
        if answer["role"] != "assistant":
            raise _Mistake(f"{name}[0].role must be assistant, not {answer['role']}")
        answers.append(answer)
    if answers[0] == answers[1]:
        raise _Mistake("preferred_output and non_preferred_output are the same")
    return FileLine(number=number, messages=messages, tools=tools, preferred=answers[0], rejected=answers[1])


def _tools_of(item: Mapping[str, Any], place: str) -> list[dict[str, Any]] | None:
    if item.get("functions") is not None:
        raise _Mistake(f"{place}functions is not taken any more: write tools")
    if not isinstance(item.get("parallel_tool_calls"), bool | None):
        raise _Mistake(f"{place}parallel_tool_calls must be a boolean")
    tools = item.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise _Mistake(f"{place}tools must be a list")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not _is_text(function.get("name")):
            raise _Mistake(f"{place}tools[{index}] must be of type function, with a function that has a name")
        if not isinstance(function.get("parameters"), dict | None):
            raise _Mistake(f"{place}tools[{index}].function.parameters must be a JSON schema")
    return tools


def _messages(value: object, place: str, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _Mistake(f"{place} must be a list of at least one message")
    named, called = {tool["function"]["name"] for tool in tools or ()}, set[str]()
    for index, message in enumerate(value):
        at = f"{place}[{index}]"
        if not isinstance(message, dict):
            raise _Mistake(f"{at} must be an object")
        _check_message(message, at)
        for number, call in enumerate(message.get("tool_calls") or ()):
            called.add(_check_call(call, f"{at}.tool_calls[{number}]", named))
        if message["role"] == "tool" and message.get("tool_call_id") not in called:
            raise _Mistake(f"{at}.tool_call_id names no call of a message before it")
    return value


def _check_message(message: Mapping[str, Any], at: str) -> None:
    role, content, calls, weight = (message.get(name) for name in ("role", "content", "tool_calls", "weight"))
    if role not in _ROLES:
        raise _Mistake(f"{at}.role must be one of {', '.join(_ROLES)}, not {role!r:.64}")
    _refuse_unknown(message, _MESSAGE_FIELDS, f"{at}.")
    if weight is not None and (role != "assistant" or type(weight) is not int or weight not in (0, 1)):
        raise _Mistake(f"{at}.weight must be 0 or 1, and stand in messages of the assistant alone")
    if calls is not None and (role != "assistant" or not isinstance(calls, list) or not calls):
        raise _Mistake(f"{at}.tool_calls must be a list that is not empty, in a message of the assistant")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise _Mistake(f"{at}.content[{number}] must be text: {kind} is not learnt from")
    if not (isinstance(content, str | list) or (content is None and calls)):
        raise _Mistake(f"{at}.content must be a string, or a list of parts of type text")
    for name in ("name", "tool_call_id", "reasoning_content", "refusal"):
        if not isinstance(message.get(name), str | None):
            raise _Mistake(f"{at}.{name} must be a string")


def _check_call(call: object, at: str, named: Collection[str]) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise _Mistake(f"{at} must be of type function, with a function")
    if not _is_text(call.get("id")):
        raise _Mistake(f"{at}.id must be a string")
    if function.get("name") not in named:
        raise _Mistake(f"{at} calls {function.get('name')!r:.64}, which is none of the tools of the line")
    try:
        arguments = orjson.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        arguments = None
    if not isinstance(arguments, dict) or not isinstance(function["arguments"], str):
        raise _Mistake(f"{at}.function.arguments must be a string that holds a JSON object")
    return str(call["id"])


def _refuse_unknown(item: Mapping[str, Any], known: Collection[str], place: str) -> None:
    if unknown := next((name for name in item if name not in known), None):
        raise _Mistake(f"unknown field {place}{unknown[:64]}; there are {', '.join(known)}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_deep(value: object) -> bool:
    """Whether it is nested too deeply, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)
