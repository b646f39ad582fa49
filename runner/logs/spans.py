"""Exchanges of OpenTelemetry's spans of generative AI: its own conventions, new and old, and AgentScope's.

A chat span tells its messages in `gen_ai.input.messages` and `gen_ai.output.messages` (attributes, or those of the
event `gen_ai.client.inference.operation.details`), in events of the names `gen_ai.user.message`, `gen_ai.choice` and so
on (before 1.37), or, AgentScope's, in `agentscope.function.input`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tuneloop.runner.logs.exchange import LoggedExchange, json_value, may_train, objects, optional_text
from tuneloop.runner.rewards.chat_messages import ChatMessage, chat_messages, tool_call
from tuneloop.runner.rewards.reply import text_of

_CHATS = frozenset({"chat", "chat_model", "generate_content"})
_MEDIA = frozenset({"uri", "blob", "file", "image", "audio", "video"})
_DROPPED = "of its attributes or events were left out when it was written"
_DETAILS = "gen_ai.client.inference.operation.details"
_EVENT = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GenAiSpan:
    """A span: its attributes by their dotted names, and its events, each a name with attributes. Times in seconds.

    `dropped` is how many attributes and events whoever wrote it left out.
    """

    span_id: str
    trace_id: str
    attributes: Mapping[str, Any]
    events: Sequence[tuple[str, Mapping[str, Any]]] = ()
    start: float | None = None
    failed: bool = False
    resource: Mapping[str, Any] = field(default_factory=dict)
    dropped: int = 0

    @property
    def may_train(self) -> bool:
        """Whether nobody said no, on the span or on what wrote it."""
        return may_train(self.attributes, {"metadata": json_value(self.attributes.get("metadata"))}, self.resource)


def exchange_of_span(span: GenAiSpan, *, source: str, place: str) -> LoggedExchange | None:
    """The exchange that a chat span tells of; None for other spans, and for one that was told no messages to keep.

    Raises one of UNREADABLE for a chat of which what is told cannot be read, or is not whole.
    """
    kind = span.attributes.get("gen_ai.operation.name")
    if kind not in _CHATS:
        if span.dropped and kind is None and any(name.startswith("gen_ai.") for name in span.attributes):
            raise ValueError(f"{span.dropped} {_DROPPED}: its kind is not known")
        return None
    if span.dropped:
        # Whoever writes it keeps 128 attributes by default, and a long conversation, flattened, has more. An opt-out
        # may be among those that were left out.
        raise ValueError(f"{span.dropped} {_DROPPED}: it is not whole")
    details: Mapping[str, Any] = next((fields for name, fields in span.events if name == _DETAILS), {})
    attributes = {**details, **span.attributes}
    question, reply = _messages(attributes, span.events)
    if not any(each["role"] == "user" for each in question):
        return None
    run = optional_text(attributes.get("gen_ai.conversation.id")) or span.trace_id
    models = ("gen_ai.request.model", "gen_ai.response.model")
    return LoggedExchange(
        source=source,
        place=place,
        exchange_id=span.span_id,
        # A conversation may last for days of many users' traces; what continues what is found within a trace.
        conversation=f"{run}/{span.trace_id}",
        messages=tuple(question),
        reply=() if span.failed else tuple(reply[:1]),
        tools=_tools(attributes),
        model=next((found for name in models if (found := optional_text(attributes.get(name)))), None),
        at=span.start,
        user=optional_text(attributes.get("user.id") or attributes.get("enduser.id")),
        train=span.may_train and may_train(details),
        labels={"run_id": run},
    )


def _messages(
    attributes: Mapping[str, Any], events: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """What was asked and what was answered, from whichever of the three ways was used."""
    question, reply = _of_parts(attributes, "input"), _of_parts(attributes, "output")
    if question:
        return question, reply
    given = attributes.get("agentscope.function.input")
    if given is not None:
        return _of_call(given), reply
    return _of_events(events)


def _of_parts(attributes: Mapping[str, Any], side: str) -> list[ChatMessage]:
    system = _parts(objects(attributes.get("gen_ai.system_instructions")), "system") if side == "input" else []
    listed = _objects_of(attributes, f"gen_ai.{side}.messages")
    return [message for message in system if message["content"]] + [
        message
        for each in listed
        for message in _parts(objects(each.get("parts")), str(each.get("role") or "user"), each)
    ]


def _objects_of(attributes: Mapping[str, Any], name: str) -> tuple[dict[str, Any], ...]:
    """The objects of a list. Raises ValueError for a text that is no JSON: it was cut off."""
    value = attributes.get(name)
    if isinstance(value, str) and value.strip():
        try:
            json.loads(value)
        except ValueError as error:
            raise ValueError(f"{name} is no JSON: {error}") from None
    return objects(value)


def _parts(parts: Sequence[Mapping[str, Any]], role: str, whole: Mapping[str, Any] | None = None) -> list[ChatMessage]:
    if not parts and whole is not None and isinstance(whole.get("content"), str):
        parts = [{"type": "text", "content": whole["content"]}]
    made: list[ChatMessage] = []
    # AgentScope 2.x has a call, its result and what was said then in one message.
    for is_result, group in groupby(parts, key=lambda each: each.get("type") == "tool_call_response"):
        grouped = list(group)
        made += map(_result, grouped) if is_result else [_message_of(grouped, role)]
    return made or [{"role": role, "content": ""}]


def _message_of(parts: Sequence[Mapping[str, Any]], role: str) -> ChatMessage:
    calls = [tool_call(each.get("name"), each.get("arguments"), each.get("id")) for each in _kind(parts, "tool_call")]
    thought = "\n".join(str(each.get("content", "")) for each in _kind(parts, "reasoning"))
    texts = [
        f"[{each.get('modality') or each['type']}]" if each.get("type") in _MEDIA else str(each.get("content", ""))
        for each in parts
        if each.get("type") in _MEDIA or each.get("type") == "text"
    ]
    message: ChatMessage = {"role": role, "content": "".join(texts)}
    message |= {"tool_calls": calls} if calls else {}
    message |= {"reasoning_content": thought} if thought else {}
    return message


def _kind(parts: Sequence[Mapping[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    return (each for each in parts if each.get("type") == kind)


def _result(part: Mapping[str, Any]) -> ChatMessage:
    result = part.get("response", part.get("result", part.get("content")))
    blocks = objects(result)  # AgentScope's, as JSON text
    if blocks and all(isinstance(each.get("text"), str) for each in blocks):
        result = text_of(blocks)
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return {"role": "tool", "content": text, "tool_call_id": str(part.get("id") or "")}


def _of_call(given: object) -> list[ChatMessage]:
    """The messages among the arguments of AgentScope's model."""
    call = json.loads(given) if isinstance(given, str) else given
    if not isinstance(call, Mapping):
        return []
    named, listed = call.get("kwargs") or {}, call.get("args") or []
    messages = named.get("messages") if isinstance(named, Mapping) else None
    found = messages or next((each for each in listed if isinstance(each, list)), [])
    return chat_messages([each for each in found if isinstance(each, Mapping)])


def _of_events(events: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[ChatMessage], list[ChatMessage]]:
    question: list[ChatMessage] = []
    reply: list[ChatMessage] = []
    for name, fields in events:
        if found := _EVENT(name):
            question += chat_messages(_event_message(fields, found[1]))
        elif name == "gen_ai.choice":
            message = _object(fields.get("message"))
            reply += chat_messages(_event_message({**fields, **message}, "assistant"))
    return question, reply


def _event_message(fields: Mapping[str, Any], role: str) -> ChatMessage:
    message: ChatMessage = {"role": role, "content": fields.get("content") or ""}
    if calls := objects(fields.get("tool_calls")):
        message["tool_calls"] = list(calls)
    if role == "tool" and fields.get("id"):
        message["tool_call_id"] = fields["id"]
    return message


def _tools(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools that were offered, as OpenAI has them: the conventions have them flat."""
    return tuple(
        each
        if "function" in each
        else {"type": "function", "function": {key: value for key, value in each.items() if key != "type"}}
        for each in objects(attributes.get("gen_ai.tool.definitions"))
    )


def _object(value: object) -> dict[str, Any]:
    read = json.loads(value) if isinstance(value, str) else value
    return dict(read) if isinstance(read, Mapping) else {}
