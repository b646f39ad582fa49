"""A data set of tasks made of logged exchanges, and its file: JSON lines, each task with where it comes from."""

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.exchange import LoggedExchange, json_lines
from tuneloop.runner.logs.timelines import essence_of
from tuneloop.runner.private_files import private_opener
from tuneloop.runner.rewards.chat_messages import ChatMessage
from tuneloop.runner.rewards.reply import ToolCall, calls_of, text_of
from tuneloop.runner.tasks.filters import ExchangeFilter


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTask:
    """A task: what a user asked, as `messages`, of which `question` is the last one's text.

    `answer` is what would be right, where somebody said so; `reply` is what a model answered, right or wrong, with
    `reward` and the `expected_calls` of tools if there were any on the way to an answer. `provenance` says where it
    comes from: `source`, `place`, `ids`, `conversation`, and `parent` of one that a model made of another. `scores` are
    a judge's.
    """

    task_id: str
    question: str
    messages: tuple[ChatMessage, ...]
    answer: str | None = None
    expected_calls: tuple[Mapping[str, Any], ...] = ()
    reply: str | None = None
    reward: float | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The row of a file; what is unknown or empty is left out, but for the answer."""
        row = asdict(self)
        return {name: value for name, value in row.items() if name == "answer" or value not in (None, (), {}, [])}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "ImportedTask":
        """A row of such a file. A row of others needs a `question` only. Raises ValueError for anything else."""
        question = row.get("question")
        if not isinstance(question, str) or not question.strip():
            raise ValueError("a task needs a question")
        turns = row.get("messages") or [{"role": "user", "content": question}]
        known = {name: row[name] for name in ("answer", "reply", "reward", "provenance", "scores") if name in row}
        lists: dict[str, Any] = {name: tuple(row.get(name) or ()) for name in ("expected_calls", "tools")}
        task_id = row.get("task_id")
        named = str(task_id) if isinstance(task_id, str | int) else _digest(turns)
        return cls(task_id=named, question=question, messages=tuple(turns), **lists, **known)


@dataclass(frozen=True, slots=True)
class ImportCounts:
    """What became of the exchanges: how many were read, filtered out, kept out by their owners, and made tasks."""

    read: int
    filtered: int
    opted_out: int
    without_question: int
    tasks: int


def tasks_of(
    exchanges: Iterable[LoggedExchange],
    *,
    keep: ExchangeFilter | None = None,
    trust: float | None = None,
    include_opted_out: bool = False,
) -> tuple[list[ImportedTask], ImportCounts]:
    """The tasks in exchanges, in their order: one for each different thing that a user asked in a conversation.

    Calls that an agent made on the way from one question to its answer are one task. A conversation of which anything
    must not be trained on is left out as a whole, unless `include_opted_out`. `keep` is a filter
    (tuneloop.runner.tasks.filters). A reply becomes the `answer` if it is an edited or a wanted one, or if its reward
    is `trust` or more.
    """
    found = list(exchanges)
    barred = set() if include_opted_out else {(each.source, each.conversation) for each in found if not each.train}
    allowed = [each for each in found if (each.source, each.conversation) not in barred]
    wanted = [each for each in allowed if keep is None or keep(each)]
    groups: dict[tuple[str, str, str], list[LoggedExchange]] = defaultdict(list)
    silent = 0
    for each in wanted:
        turns = question_of(each.messages)
        if turns:
            groups[each.source, each.conversation, _digest(essence_of(turns))].append(each)
        else:
            silent += 1
    tasks = [_task(group, trust) for group in groups.values()]
    return tasks, ImportCounts(
        read=len(found),
        filtered=len(allowed) - len(wanted),
        opted_out=len(found) - len(allowed),
        without_question=silent,
        tasks=len(tasks),
    )


def question_of(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """The messages up to the last one of a user that says something; none if there is none."""
    places = [at for at, each in enumerate(messages) if each["role"] == "user" and text_of(each["content"]).strip()]
    return tuple(messages[: places[-1] + 1]) if places else ()


def _task(group: Sequence[LoggedExchange], trust: float | None) -> ImportedTask:
    longest = max(group, key=lambda each: len(each.transcript))
    turns = question_of(longest.messages)
    after = longest.transcript[len(turns) :]
    reply = next((text_of(each.get("content")) for each in reversed(after) if each["role"] == "assistant"), None)
    calls = [call for each in after if each["role"] == "assistant" for call in calls_of(each)]
    rewards = [each.reward for each in group if each.reward is not None]
    reward = rewards[-1] if rewards else None
    right = bool(reply) and (longest.target or (trust is not None and reward is not None and reward >= trust))
    return ImportedTask(
        task_id=f"{longest.source}-{_digest([longest.conversation, essence_of(turns)])}",
        question=text_of(turns[-1]["content"]),
        messages=turns,
        answer=reply if right else None,
        expected_calls=tuple(_call_row(call) for call in calls) if right else (),
        reply=reply or None,
        reward=reward,
        tools=longest.tools,
        provenance=_provenance(group, longest),
    )


def _provenance(group: Sequence[LoggedExchange], longest: LoggedExchange) -> dict[str, Any]:
    known: dict[str, Any] = {
        "source": longest.source,
        "place": longest.place,
        "ids": [each.exchange_id for each in group],
        "conversation": longest.conversation,
        "users": sorted({each.user for each in group if each.user}),
        "at": min((each.at for each in group if each.at is not None), default=None),
        "model": longest.model,
    }
    return {name: value for name, value in known.items() if value not in (None, [])} | dict(longest.labels)


def _call_row(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": dict(call.arguments) if call.arguments is not None else None}


def _digest(thing: object) -> str:
    return hashlib.sha256(json.dumps(thing, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write_tasks(path: Path, tasks: Iterable[ImportedTask]) -> int:
    """Write them as JSON lines, beside the path first, so that the file is whole, and its owner's; how many there are.

    Raises ValueError for two tasks with one id.
    """
    rows = [each.to_dict() for each in tasks]
    if twice := [name for name, count in Counter(row["task_id"] for row in rows).items() if count > 1]:
        raise ValueError(f"two tasks have the id {twice[0]}")
    beside = path.with_name(f"{path.name}.part")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    beside.unlink(missing_ok=True)
    # Half of a character is "?", as cut logs have it.
    with open(beside, "w", encoding="utf-8", errors="replace", opener=private_opener) as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    return len(rows)


def read_tasks(path: Path) -> Iterator[ImportedTask]:
    """The tasks of a file of JSON lines. Raises LogRefused for a line that is none, with its number."""
    for number, row in json_lines(path):
        try:
            yield ImportedTask.from_dict(row)
        except (ValueError, TypeError) as error:
            raise LogRefused(f"{path}:{number}: {error}") from None


def with_scores(task: ImportedTask, scores: Mapping[str, float]) -> ImportedTask:
    """The task with a judge's scores."""
    return replace(task, scores={**task.scores, **scores})
