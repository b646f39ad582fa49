"""Held-out tasks with known answers, and how a reply to one is judged.

{"messages": [{"role": "user", "content": "7+5="}], "answer": "12", "slice": "sums"}
{"prompt": "The capital of France is", "answer": "Paris"}
{"prompt": "7+5 as JSON:", "answer": "12", "format": "json"}
"""

import importlib
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tuneloop.shared.errors import EnvironmentRefused, NotEvaluated
from tuneloop.shared.settings.feedback import JudgeSettings
from tuneloop.shared.settings.versions import EvaluationSettings

Question = str | list[dict[str, Any]]

#: Scores a reply from 0 to 1; None if it has no verdict on it. Raises NotEvaluated if it cannot score now.
Judge = Callable[["Task", str], float | None]

_LONGEST_SLICE = 64

#: Any JSON value, and nothing else beside it.
JSON = "json"

_OF_JSON = ("json_object", "json_schema")


class Task(NamedTuple):
    """A question, messages or raw text, its answer, the file's line, and the `form` of the reply, None: any."""

    line: int
    question: Question
    answer: str
    slice: str | None
    form: str | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.question}] if isinstance(self.question, str) else self.question


def tasks_of(options: EvaluationSettings, *, named: str = "monitor.evaluation.path: ") -> list[Task]:
    """The tasks of a file, none without one. Raises EnvironmentRefused, naming the line that is wrong."""
    if options.path is None:
        return []
    try:
        lines = options.path.read_bytes().splitlines()
    except OSError as error:
        raise EnvironmentRefused(
            f"{named}{options.path} cannot be read: {error.strerror}; name a file of tasks"
        ) from error
    tasks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(_task(number, line, options))
            except ValueError as error:
                raise EnvironmentRefused(f"{named}{options.path}, line {number}: {error}") from None
    if not tasks:
        raise EnvironmentRefused(f"{named}{options.path} holds no task")
    return tasks


def fingerprint(tasks: Sequence[Task], options: EvaluationSettings, judge: JudgeSettings) -> int:
    """A number that differs for other tasks or judges. Raises EnvironmentRefused for a rubric that cannot be read."""
    questions = [[task.question, task.answer, task.slice, task.form] for task in tasks]
    judged_by: list[Any] = [options.judge, options.function, options.most_tokens, questions]
    if tasks and options.judge == "model":
        judged_by += [judge.model, judge.samples, judge.temperature]
        try:
            rubric = judge.rubric and zlib.crc32(judge.rubric.read_bytes())
        except OSError as error:
            raise EnvironmentRefused(f"judge.rubric: {judge.rubric} cannot be read: {error.strerror}") from error
        judged_by += [judge.criteria, judge.weights, judge.scale] if rubric is None else [rubric]
    return zlib.crc32(json.dumps(judged_by, sort_keys=True).encode())


def judge_of(options: EvaluationSettings) -> Judge | None:
    """How replies are judged; None: by a model. Raises EnvironmentRefused for a function that is not there."""
    if options.judge == "model":
        return None
    if options.judge == "function":
        return _by_function(options)
    return lambda task, reply: float(is_right(task.answer, reply, options))


def is_right(answer: str, reply: str, options: EvaluationSettings) -> bool:
    """Whether the reply, without the reasoning before it, is the answer by the settings' `judge`.

    >>> is_right("12", "<think>7+5</think> It is 12.", EvaluationSettings(judge="contains"))
    True
    """
    answered = without_reasoning(reply)
    if options.judge == "exact":
        return answered.strip() == answer.strip()
    if options.judge == "regex":
        return re.search(answer, answered) is not None
    return answer in answered


def without_reasoning(reply: str) -> str:
    return reply.rpartition("</think>")[2]


def _by_function(options: EvaluationSettings) -> Judge:
    name = options.function or ""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # As `python -m` has it; a console script has not.
        sys.path.append(str(Path.cwd()))
    try:
        function: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise EnvironmentRefused(f"monitor.evaluation.function: {name} cannot be imported: {error!r}") from error
    if not callable(function):
        raise EnvironmentRefused(f"monitor.evaluation.function: {name} is {type(function).__name__}, not a function")

    def judge(task: Task, reply: str) -> float:
        try:
            score = float(function(task.question, task.answer, without_reasoning(reply)))
        except Exception as error:
            raise NotEvaluated(f"monitor.evaluation.function: {options.function} raised {error!r}") from error
        if not (math.isfinite(score) and 0 <= score <= 1):
            raise NotEvaluated(f"monitor.evaluation.function: {options.function} returned {score}, not 0 to 1")
        return score

    return judge


def _task(number: int, line: bytes, options: EvaluationSettings) -> Task:
    """Raises ValueError with the line's mistake."""
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError('must be an object, such as {"prompt": "7+5=", "answer": "12"}')
    answer, part = fields.get("answer"), fields.get("slice")
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("`answer` must be text, and not empty; write a number in quotes")
    if part is not None and not (isinstance(part, str) and 0 < len(part) <= _LONGEST_SLICE):
        raise ValueError(f"`slice` must be text of at most {_LONGEST_SLICE} characters")
    if options.judge == "regex":
        try:
            re.compile(answer)
        except re.error as error:
            raise ValueError(
                f"`answer` is not a regular expression, which monitor.evaluation.judge asks for: {error}"
            ) from None
    return Task(number, _question(fields), answer, part, format_of(fields))


def _question(fields: dict[str, Any]) -> Question:
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError("needs either `prompt` or `messages`")
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("`prompt` must be text, and not empty")
        return prompt
    read = messages if isinstance(messages, list) else []
    if not read or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each for each in read
    ):
        raise ValueError('`messages` must be a list of messages, such as {"role": "user", "content": "7+5="}')
    return read


def format_of(task: Mapping[str, Any]) -> str | None:
    """JSON, a regular expression, or None; a `response_format` may demand JSON. Raises ValueError."""
    pattern = task.get("format")
    if pattern is None:
        response_format = task.get("response_format")
        return JSON if isinstance(response_format, dict) and response_format.get("type") in _OF_JSON else None
    if not isinstance(pattern, str) or not pattern:
        raise ValueError('`format` must be "json" or a regular expression')
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f'`format` must be "json" or a regular expression of Python\'s ({error})') from None
    return pattern


def matches_format(wanted: str, reply: str) -> bool:
    """Whether the whole reply, but for white space at its ends, has the format.

    >>> matches_format(JSON, ' {"a": 1}'), matches_format(JSON, 'Here: {"a": 1}')
    (True, False)
    >>> matches_format("[A-D]", "B"), matches_format("[A-D]", "B.")
    (True, False)
    """
    text = reply.strip()
    if wanted != JSON:
        return re.fullmatch(wanted, text) is not None
    try:
        json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False
    return True


def _no_json(name: str) -> NoReturn:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(name)
