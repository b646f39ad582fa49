"""What feedback is about: the id of a reply, whatever object a client library made of it, or a whole run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: What LangChain calls messages whose own id it lost.
_LANGCHAIN_RUNS = ("run-", "lc_run-")

_NO_ID = (
    "it has no id of a reply: give a reply object of openai, Anthropic, LangChain or AgentScope, its JSON, or its id"
)

_LOST_ID = (
    "LangChain gives this message an id of its own: make the model with ChatOpenAI(include_response_headers=True), "
    "or give feedback on the run"
)


@dataclass(frozen=True, slots=True)
class WholeRun:
    """Every reply of one attempt `run_id` at the task `task_id`, those too that are still to come."""

    task_id: str | int
    run_id: str | int


def reply_id(reply: object, choice: int | None = None) -> str:
    """The id of a reply, or of one of its choices: what feedback names it by.

    Raises ValueError where there is none.

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
    """The part of a feedback entry that says what it is about: `msg_ids`, or `task_id` and `run_id`."""
    if isinstance(reply, Sequence) and not isinstance(reply, str):
        if not reply:
            raise ValueError("an empty list names no reply")
        return {"msg_ids": [reply_id(each, choice) for each in reply]}
    if (run := _run_in(reply)) is None:
        return {"msg_ids": [reply_id(reply, choice)]}
    if choice is not None:
        raise ValueError("choice: a whole run has no choices")
    return run


def _run_in(reply: object) -> dict[str, Any] | None:
    if isinstance(reply, Mapping):
        names = reply.get("task_id"), reply.get("run_id")
        named = None in names or "id" in reply
    else:
        names = getattr(reply, "task_id", None), getattr(reply, "run_id", None)
        named = not all(isinstance(each, str | int) for each in names)
    return None if named else {"task_id": str(names[0]), "run_id": str(names[1])}


def _id_in(reply: object) -> str:
    if isinstance(reply, str):
        found: object = reply
    elif (metadata := _get(reply, "response_metadata")) is not None:
        found = _id_in_metadata(metadata) or _get(reply, "id")
        if isinstance(found, str) and found.startswith(_LANGCHAIN_RUNS):
            raise ValueError(_LOST_ID)
    elif (found := _get(reply, "id")) is None:
        # The events that begin Anthropic's streams and those of responses, and LangChain's generations.
        inner = next((each for each in (_get(reply, "message"), _get(reply, "response")) if each is not None), None)
        if inner is None or inner is reply:
            raise ValueError(f"{_kind(reply)}: {_NO_ID}")
        return _id_in(inner)
    if not isinstance(found, str) or not found.strip():
        raise ValueError(f"{_kind(reply)}: {_NO_ID}")
    return found


def _id_in_metadata(metadata: object) -> object:
    headers = _get(metadata, "headers")
    return _get(metadata, "id") or (_get(headers, "x-request-id") if headers is not None else None)


def _get(thing: object, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _kind(thing: object) -> str:
    return type(thing).__name__
