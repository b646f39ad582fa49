"""Builds feedback entries: the verbs, and the ids of replies."""

import json
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from tuneloop.runner.rewards.composite import Score

_LANGCHAIN_RUNS = ("run-", "lc_run-")  # LangChain's prefixes for messages that lost their own id

_NO_ID = "it has no reply id: give a reply object of openai, Anthropic, LangChain or AgentScope, its JSON, or its id"

_LOST_ID = (
    "LangChain gives this message an id of its own: make the model with ChatOpenAI(include_response_headers=True), "
    "or give feedback on the run"
)


@dataclass(frozen=True, slots=True)
class WholeRun:
    """All replies, past and future, of attempt `run_id` at task `task_id`."""

    task_id: str | int
    run_id: str | int


def reply_id(reply: object, choice: int | None = None) -> str:
    """The id of a reply or of one of its choices, as feedback names it. Raises ValueError.

    >>> reply_id({"id": "chatcmpl-1", "choices": []}, choice=1)
    'chatcmpl-1:1'
    """
    found = _id_in(reply)
    if choice is None:
        return found
    if isinstance(choice, bool) or not isinstance(choice, int) or choice < 0:
        raise ValueError(f"choice: {choice!r} is no index of a choice")
    if ":" in found:
        raise ValueError(f"choice: {found} names a choice already")
    return f"{found}:{choice}"


def subject_of(reply: object, choice: int | None = None) -> dict[str, Any]:
    if isinstance(reply, Sequence) and not isinstance(reply, str):
        if not reply:
            raise ValueError("an empty list names no reply")
        return {"msg_ids": [reply_id(each, choice) for each in reply]}
    task_id, run_id = _get(reply, "task_id"), _get(reply, "run_id")
    if not (isinstance(task_id, str | int) and isinstance(run_id, str | int)) or _get(reply, "id") is not None:
        return {"msg_ids": [reply_id(reply, choice)]}
    if choice is not None:
        raise ValueError("choice: a whole run has no choices")
    return {"task_id": str(task_id), "run_id": str(run_id)}


def _id_in(reply: object) -> str:
    if isinstance(reply, str):
        found: object = reply
    elif (metadata := _get(reply, "response_metadata")) is not None:
        headers = _get(metadata, "headers")
        found = (_get(metadata, "id") or (_get(headers, "x-request-id") if headers is not None else None)) or _get(
            reply, "id"
        )
        if isinstance(found, str) and found.startswith(_LANGCHAIN_RUNS):
            raise ValueError(_LOST_ID)
    elif (found := _get(reply, "id")) is None:
        # First events of Anthropic's and the responses' streams, and LangChain's generations.
        inner = next((each for each in (_get(reply, "message"), _get(reply, "response")) if each is not None), None)
        if inner is None or inner is reply:
            raise ValueError(f"{_kind(reply)}: {_NO_ID}")
        return _id_in(inner)
    if not isinstance(found, str) or not found.strip():
        raise ValueError(f"{_kind(reply)}: {_NO_ID}")
    return found


def _get(thing: object, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _kind(thing: object) -> str:
    return type(thing).__name__


Entry = dict[str, Any]  # an entry of `feedback` in a request body

#: The service's limits: characters of a name, magnitude of a number; and half of its largest body.
MAX_NAME, MAX_REWARD, MAX_ENTRY_BYTES = 256, 1e6, 4 << 20

_NAMES = ("metric", "source", "idempotency_key", "task_id", "run_id")

Given = TypeVar("Given")


class Options(TypedDict, total=False):
    """Options of a verb: `choice`, `metric`, `source`, and `time` (seconds since 1970 or a datetime; default now).

    The service accepts a `key` once. `task_id` and `run_id` name the reply's task and run if its request did not.
    """

    choice: int | None
    metric: str
    source: str
    time: float | datetime
    key: str
    task_id: str | int
    run_id: str | int


class FeedbackVerbs(Generic[Given]):
    """The verbs of feedback; subclasses deliver in `_take`. Raise ValueError for invalid arguments.

    `reply` is a reply object of openai, Anthropic, LangChain or AgentScope, its JSON, its id, or a list of them; or a
    whole run: an object or mapping with `task_id` and `run_id`, such as `WholeRun`.
    """

    _source: str | None = None

    def reward(self, reply: object, value: float | Score, **options: Unpack[Options]) -> Given:
        """A number within ±1e6, or a Score, whose components are sent under their own metrics."""
        if isinstance(value, Score):
            parts = {"reward": value.total} | {name: each for name, each in value.values.items() if each is not None}
            entries = [{"metric": name, "value": _number(each)} for name, each in parts.items()]
            return self._take(self._entries(reply, entries, options))
        return self._take(self._entries(reply, [{"reward": _number(value)}], options))

    def thumb(self, reply: object, up: bool, **options: Unpack[Options]) -> Given:
        if not isinstance(up, bool):
            raise ValueError(f"up: {up!r} is neither True nor False")
        return self._take(self._entries(reply, [{"value": up}], options))

    def thumbs_up(self, reply: object, **options: Unpack[Options]) -> Given:
        return self.thumb(reply, True, **options)

    def thumbs_down(self, reply: object, **options: Unpack[Options]) -> Given:
        return self.thumb(reply, False, **options)

    def label(self, reply: object, label: str, **options: Unpack[Options]) -> Given:
        """A label of at most 256 characters; its metric is `reward` by default."""
        return self._take(self._entries(reply, [{"value": _name(label, "label")}], options))

    def comment(self, reply: object, text: str, **options: Unpack[Options]) -> Given:
        """A comment: kept, never part of the reward."""
        return self._take(self._entries(reply, [{"comment": _text(text, "comment")}], options))

    def edit(self, reply: object, answer: str | Mapping[str, Any], **options: Unpack[Options]) -> Given:
        """The correct answer: its text, or an assistant message."""
        better = dict(answer) if isinstance(answer, Mapping) else _text(answer, "answer")
        return self._take(self._entries(reply, [{"demonstration": better}], options))

    def prefer(self, better: object, worse: object, **options: Unpack[Options]) -> Given:
        """One reply is better than another. For choices: `prefer(reply_id(a, 0), reply_id(a, 1))`."""
        preference = {"preferred_over": reply_id(worse)}
        if "msg_ids" not in (about := subject_of(better, options.get("choice"))) or len(about["msg_ids"]) != 1:
            raise ValueError("better: name one reply, not a run or several replies")
        if about["msg_ids"] == [preference["preferred_over"]]:
            raise ValueError("a reply cannot be preferred over itself")
        return self._take(self._entries(better, [preference], options))

    def retract(self, reply: object, **options: Unpack[Options]) -> Given:
        """Withdraw the same source's feedback under `metric`, `reward` by default."""
        return self._take(self._entries(reply, [{"retract": True}], options))

    def _take(self, entries: Sequence[Entry]) -> Given:
        raise NotImplementedError

    def _entries(self, reply: object, parts: Sequence[Mapping[str, Any]], options: Options) -> list[Entry]:
        about = subject_of(reply, options.get("choice")) | dict(_beside(options, self._source))
        entries = [about | dict(each) for each in parts]
        for each in entries:
            # Refuse here what the service would refuse.
            for field in _NAMES:
                if field in each:
                    _name(each[field], field)
            for field in ("reward", "value"):
                if isinstance(number := each.get(field), float) and abs(number) > MAX_REWARD:
                    raise ValueError(f"{number:g}: at most {MAX_REWARD:g} in size")
            try:
                size = len(json.dumps(each, allow_nan=False, ensure_ascii=False).encode())
            except (TypeError, RecursionError) as error:
                raise ValueError(f"it cannot be written as JSON: {error}") from None
            if size > MAX_ENTRY_BYTES:
                raise ValueError(f"{size} bytes: at most {MAX_ENTRY_BYTES} are sent at once")
        return entries


def _beside(options: Options, source: str | None) -> Iterator[tuple[str, Any]]:
    when = options.get("time", None)
    yield "time", when.timestamp() if isinstance(when, datetime) else time.time() if when is None else _number(when)
    yield "idempotency_key", options.get("key") or uuid.uuid4().hex
    if (who := options.get("source", source)) is not None:
        yield "source", who
    if "metric" in options:
        yield "metric", options["metric"]
    if "task_id" in options:
        yield "task_id", str(options["task_id"])
    if "run_id" in options:
        yield "run_id", str(options["run_id"])


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        # Scalars of numpy and torch.
        try:
            value = value.item()  # type: ignore[attr-defined]
        except (AttributeError, ValueError, RuntimeError):
            raise ValueError(f"{value!r} is no number: for a thumb there are thumbs_up and thumbs_down") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _text(text: object, name: str) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name}: {text!r} is no text")
    return text


def _name(text: object, field: str) -> str:
    name = _text(text, field)
    if len(name) > MAX_NAME or "\0" in name:
        raise ValueError(f"{field}: at most {MAX_NAME} characters, and no NUL")
    return name
