"""Exchanges of OpenTelemetry's spans of generative AI, by its semantic conventions, new and old, and AgentScope's own.

A chat span tells its messages in `gen_ai.input.messages` and `gen_ai.output.messages` (attributes, or those of the
event `gen_ai.client.inference.operation.details`), in events of the names `gen_ai.user.message`, `gen_ai.choice` and so
on (before 1.37), in `gen_ai.prompt.0.content` and so on (OpenLLMetry), or, AgentScope's, in
`agentscope.function.input`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuneloop.runner.logs.exchange import LoggedExchange, may_train, objects, optional_text
from tuneloop.runner.rewards.chat_messages import ChatMessage, chat_messages, tool_call

_CHATS = frozenset({"chat", "chat_model", "generate_content"})
_MEDIA = frozenset({"uri", "blob", "file", "image", "audio", "video"})
_DETAILS = "gen_ai.client.inference.operation.details"
_EVENT = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message").fullmatch
_NUMBERED = re.compile(r"gen_ai\.(prompt|completion)\.(\d+)\.(.+)").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GenAiSpan:
    """A span: its attributes by their dotted names, and its events, each a name with attributes. Times in seconds."""

    span_id: str
    trace_id: str
    attributes: Mapping[str, Any]
    events: Sequence[tuple[str, Mapping[str, Any]]] = ()
    start: float | None = None
    failed: bool = False
    resource: Mapping[str, Any] = field(default_factory=dict)


def exchange_of_span(span: GenAiSpan, *, source: str, place: str) -> LoggedExchange | None:
    """The exchange that a chat span tells of; None for other spans, and for one that was told no messages to keep."""
    if span.attributes.get("gen_ai.operation.name", span.attributes.get("llm.request.type")) not in _CHATS:
        return None
    details: Mapping[str, Any] = next((fields for name, fields in span.events if name == _DETAILS), {})
    attributes = {**details, **span.attributes}
    question, reply = _messages(attributes, span.events)
    if not any(each["role"] == "user" for each in question):
        return None
    run = optional_text(attributes.get("gen_ai.conversation.id")) or span.trace_id
    return LoggedExchange(
        source=source,
        place=place,
        exchange_id=span.span_id,
        # A conversation may last for days of many users' traces; what continues what is found within a trace.
        conversation=f"{run}/{span.trace_id}",
        messages=tuple(question),
        reply=() if span.failed else tuple(reply[:1]),
        tools=_tools(attributes),
        model=optional_text(attributes.get("gen_ai.request.model") or attributes.get("gen_ai.response.model")),
        at=span.start,
        user=optional_text(attributes.get("user.id") or attributes.get("enduser.id")),
        train=may_train(attributes, span.resource),
        labels={"run_id": run},
    )


def _messages(
    attributes: Mapping[str, Any], events: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """What was asked and what was answered, from whichever of the four ways was used."""
    question, reply = _of_parts(attributes, "input"), _of_parts(attributes, "output")
    if question:
        return question, reply
    given = attributes.get("agentscope.function.input")
    if given is not None:
        return _of_call(given), reply
    by_event = _of_events(events)
    return by_event if by_event[0] else _of_numbered(attributes)


def _of_parts(attributes: Mapping[str, Any], side: str) -> list[ChatMessage]:
    system = _parts(objects(attributes.get("gen_ai.system_instructions")), "system") if side == "input" else []
    listed = objects(attributes.get(f"gen_ai.{side}.messages"))
    return [message for message in system if message["content"]] + [
        message
        for each in listed
        for message in _parts(objects(each.get("parts")), str(each.get("role") or "user"), each)
    ]


def _parts(parts: Sequence[Mapping[str, Any]], role: str, whole: Mapping[str, Any] | None = None) -> list[ChatMessage]:
    if not parts and whole is not None and isinstance(whole.get("content"), str):
        parts = [{"type": "text", "content": whole["content"]}]
    calls = [tool_call(each.get("name"), each.get("arguments"), each.get("id")) for each in _kind(parts, "tool_call")]
    results = [_result(each) for each in _kind(parts, "tool_call_response")]
    thought = "\n".join(str(each.get("content", "")) for each in _kind(parts, "reasoning"))
    texts = [str(each.get("content", "")) for each in _kind(parts, "text")]
    texts += [f"[{each.get('modality') or each['type']}]" for each in parts if each.get("type") in _MEDIA]
    made: list[ChatMessage] = []
    if texts or calls or thought or not results:
        message: ChatMessage = {"role": role, "content": "".join(texts)}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": thought} if thought else {}
        made.append(message)
    return made + results


def _kind(parts: Sequence[Mapping[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    return (each for each in parts if each.get("type") == kind)


def _result(part: Mapping[str, Any]) -> ChatMessage:
    result = part.get("response", part.get("result", part.get("content")))
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


def _of_numbered(attributes: Mapping[str, Any]) -> tuple[list[ChatMessage], list[ChatMessage]]:
    found: dict[str, dict[int, dict[str, Any]]] = {"prompt": {}, "completion": {}}
    for key, value in attributes.items():
        if name := _NUMBERED(key):
            found[name[1]].setdefault(int(name[2]), {})[name[3]] = value
    sides = []
    for side, role in (("prompt", "user"), ("completion", "assistant")):
        ordered = [found[side][number] for number in sorted(found[side])]
        sides.append([message for each in ordered for message in chat_messages(_numbered_message(each, role))])
    return sides[0], sides[1]


def _numbered_message(fields: Mapping[str, Any], role: str) -> ChatMessage:
    message: ChatMessage = {"role": str(fields.get("role") or role), "content": fields.get("content") or ""}
    numbers = sorted({int(key.split(".")[1]) for key in fields if re.fullmatch(r"tool_calls\.\d+\..+", key)})
    if numbers:
        message["tool_calls"] = [
            tool_call(*(fields.get(f"tool_calls.{number}.{name}") for name in ("name", "arguments", "id")))
            for number in numbers
        ]
    return message


def _tools(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools that were offered, as OpenAI has them: the conventions have them flat."""
    listed = objects(attributes.get("gen_ai.tool.definitions"))
    return tuple(
        each
        if "function" in each
        else {"type": "function", "function": {key: value for key, value in each.items() if key != "type"}}
        for each in listed
    )


def _object(value: object) -> dict[str, Any]:
    read = json.loads(value) if isinstance(value, str) else value
    return dict(read) if isinstance(read, Mapping) else {}
