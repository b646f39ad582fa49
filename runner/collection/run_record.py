"""What a run was like, as one record: what was said, thought and called, what it earned, and what users said of it."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.exchange import json_lines
from tuneloop.runner.private_files import append_rows
from tuneloop.runner.rewards.chat_messages import ChatMessage, chat_messages
from tuneloop.runner.rewards.reply import Reply, calls_of, text_of

_OPENS, _CLOSES = "<think>", "</think>"

#: What a record may leave out.
RECORD_FIELDS = ("messages", "thoughts", "tool_calls", "rewards", "user_feedback")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run. `messages` are those of its longest conversation, `side_conversations` others that it had.

    `thoughts` are {step, content}: what stands in a turn of the assistant, counted from 1, beside its calls or as its
    reasoning. `tool_calls` are {tool, args, result}; args are None if they were no JSON object, result is None if there
    was none. `reply_ids` are those of the service's replies, for feedback. `tools` names the tools that were offered.
    """

    conversation_id: str
    messages: tuple[ChatMessage, ...] = ()
    thoughts: tuple[Mapping[str, Any], ...] = ()
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    total_reward: float | None = None
    user_feedback: Mapping[str, Any] = field(default_factory=dict)
    task_id: str | None = None
    run_id: str | None = None
    reply_ids: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    side_conversations: tuple[tuple[ChatMessage, ...], ...] = ()

    @classmethod
    def of_messages(cls, conversation_id: str, messages: Sequence[object], **known: Any) -> "RunRecord":
        """The record of chat messages, of whichever client (see `chat_messages`); `known` are further fields.

        Without a `total_reward` it is the sum of the rewards. Raises ValueError for what is no message, and for a
        reward that is no finite number.

        >>> record = RunRecord.of_messages("c", [{"role": "user", "content": "Hello"}], rewards={"a": 0.8, "b": 0.5})
        >>> record.total_reward
        1.3
        """
        turns = tuple(chat_messages(list(messages)))
        rewards = known.get("rewards") or {}
        if wrong := [name for name, value in rewards.items() if not math.isfinite(value)]:
            raise ValueError(f"reward {wrong[0]}: {rewards[wrong[0]]} is not a reward")
        if rewards and known.get("total_reward") is None:
            known["total_reward"] = math.fsum(rewards.values())
        fields: dict[str, Any] = {"thoughts": tuple(_thoughts(turns)), "tool_calls": tuple(_tool_calls(turns))} | known
        return cls(conversation_id=conversation_id, messages=turns, **fields)

    def as_reply(self, **known: Any) -> Reply:
        """The run as reward components and judges see it; `known` are further fields, such as `expected`."""
        return Reply.of_trajectory(self.messages, **{"tools": self.tools} | known)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object. What only some records have is left out where this one has none."""
        named = ("conversation_id", *RECORD_FIELDS, "total_reward")
        more = ("task_id", "run_id", "reply_ids", "tools", "side_conversations")
        row = {name: _json(getattr(self, name)) for name in named}
        return row | {name: _json(getattr(self, name)) for name in more if getattr(self, name)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "RunRecord":
        """What `to_dict` made. Raises ValueError for anything else."""
        if not isinstance(row.get("conversation_id"), str):
            raise ValueError("a record needs a conversation_id")
        if unknown := sorted(row.keys() - set(cls.__slots__)):
            raise ValueError(f"a record has no field {unknown[0]}")
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in row.items()
        }
        return cls(**fields)


def write_records(path: Path, records: Iterable[RunRecord]) -> int:
    """Append them to a file of JSON lines, its owner's alone; how many there were. They are on disk then."""
    rows = [each.to_dict() for each in records]
    append_rows(path, rows)
    return len(rows)


def read_records(path: Path) -> Iterator[RunRecord]:
    """The records of such a file. Raises LogRefused for a line that is none, with its number."""
    for number, row in json_lines(path):
        try:
            yield RunRecord.from_dict(row)
        except (ValueError, TypeError) as error:
            raise LogRefused(f"{path}:{number}: {error}") from None


def _thoughts(messages: Sequence[ChatMessage]) -> Iterator[dict[str, Any]]:
    turns = [each for each in messages if each["role"] == "assistant"]
    for step, turn in enumerate(turns, start=1):
        reasoning, text = str(turn.get("reasoning_content") or ""), text_of(turn.get("content"))
        before, closes, after = text.partition(_CLOSES)
        if closes:
            reasoning, text = "\n".join(filter(None, (reasoning, before.replace(_OPENS, "").strip()))), after
        if turn.get("tool_calls") and text.strip():
            reasoning = "\n".join(filter(None, (reasoning, text.strip())))
        if reasoning:
            yield {"step": step, "content": reasoning}


def _tool_calls(messages: Sequence[ChatMessage]) -> Iterator[dict[str, Any]]:
    """The calls with their results: by the call's id, or where there is none by their order."""
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        answers = []
        for later in messages[at + 1 :]:
            if later["role"] == "assistant":
                break
            if later["role"] == "tool":
                answers.append(later)
        listed = message.get("tool_calls") or []
        for call, written in zip(calls_of(message), listed, strict=True):
            answer = _answer_to(str(written.get("id") or ""), answers)
            result = None if answer is None else text_of(answer.get("content"))
            yield {
                "tool": call.name,
                "args": None if call.arguments is None else dict(call.arguments),
                "result": result,
            }


def _answer_to(call_id: str, answers: list[ChatMessage]) -> ChatMessage | None:
    by_id = [each for each in answers if call_id and each.get("tool_call_id") == call_id]
    left = by_id or [each for each in answers if not call_id or not each.get("tool_call_id")]
    if not left:
        return None
    answers.remove(left[0])
    return left[0]


def _json(value: object) -> Any:
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    return dict(value) if isinstance(value, Mapping) else value
