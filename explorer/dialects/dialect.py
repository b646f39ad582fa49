"""The API dialects: what a request becomes for the engine, and how its reply is written for the client."""

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple

import orjson

from tuneloop.explorer.auth import Caller
from tuneloop.explorer.dialects import messages, responses_reply, responses_request
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.engines.fleet import Engine, Fleet, least_busy
from tuneloop.explorer.http.bodies import coerce_int, flag_of
from tuneloop.explorer.http.errors import anthropic_engine_error, anthropic_error
from tuneloop.explorer.transcript import (
    MAX_CHOICES,
    ChatTranscript,
    RequestedFields,
    TextTranscript,
    TokenPieces,
    Transcript,
)
from tuneloop.shared.errors import EngineError, RequestRefused
from tuneloop.shared.experience import minted_at

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"

Json = dict[str, Any]

#: The chat messages up to a response of a caller's tenant, by its id.
ReadConversation = Callable[[str, Caller], Awaitable[Sequence[Json]]]


class ReplyWriter:
    """Writes one reply for the client while its transcript captures it; this one without translation."""

    #: An event that clients ignore.
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"

    def __init__(self, transcript: Transcript, tokens: TokenPieces | None = None) -> None:
        """`tokens` reads those pieces of a stream that it can."""
        self.transcript = transcript
        #: Whether the engine has sent the end of the stream.
        self.done = False
        #: The model's name in a reply, and the one that the client gets in its place.
        self.renaming: tuple[bytes, bytes] | None = None
        self._tokens = tokens
        self._rest = bytearray()

    def convert_whole(self, reply: bytes) -> bytes:
        """The body that the client gets. Raises EngineError if the reply cannot be read."""
        return self._view(self.transcript.feed(reply)) or b""

    def convert_block(self, block: bytes) -> bytes:
        """The bytes for what a block of a stream completes. Raises EngineError if that cannot be read."""
        events = split_events(self._rest, block)
        return self.convert_event(events[0]) if len(events) == 1 else b"".join(map(self.convert_event, events))

    def convert_event(self, event: bytes) -> bytes:
        """The bytes for a server-sent event (without its blank line); empty if the client does not get it."""
        if event == b"data: [DONE]":
            self.done = True
            return b""
        if event.startswith(b"data: "):
            return self._convert_data(event[6:])
        return event + b"\n\n" if event.startswith(b":") else b""  # a comment keeps the connection alive

    def _convert_data(self, data: bytes) -> bytes:
        tokens = self._tokens
        if tokens is not None and (chunk := tokens.read(data)) is not None:
            return b"data: %b\n\n" % (self._view(chunk) or b"") if chunk else b""
        chunk = self._view(self.transcript.feed(data))
        if tokens is not None:
            tokens.learn(data)
        return b"" if chunk is None else b"data: %b\n\n" % chunk

    def rename(self, name: str, *, to: str) -> None:
        self.renaming = b'"model":%b' % orjson.dumps(name), b'"model":%b' % orjson.dumps(to)

    def _view(self, view: bytes | None) -> bytes | None:
        return view.replace(*self.renaming, 1) if view and self.renaming else view

    def finish(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error_event(self, message: str, code: str) -> bytes:
        error = {"message": message, "type": "server_error", "param": None, "code": code}
        return b"data: %b\n\n" % orjson.dumps({"error": error})

    def convert_error(self, error_body: Json, status: int) -> Json:
        return error_body


class Dialect(ABC):
    """One endpoint. `path` is the client's route, `prefix` that of the ids of its replies."""

    path: ClassVar[str]
    prefix: ClassVar[str]
    #: The engine's route, and the prefix of the ids of its replies.
    upstream_path: ClassVar[str] = CHAT
    upstream_prefix: ClassVar[str] = "chatcmpl-"
    #: The engine's field for the most tokens of a reply, if the default limit applies to this endpoint.
    length_field: ClassVar[str | None] = "max_completion_tokens"

    def normalize(self, body: Json) -> Json:
        return body

    async def to_upstream(self, body: Json, caller: Caller) -> Json:
        return body

    def left_out(self, body: Json) -> tuple[str, ...]:
        return ()

    def capture_fields(self, upstream: Mapping[str, Any]) -> Mapping[str, object]:
        return vllm.CAPTURE

    def count_choices(self, upstream: Json) -> int:
        return choice_count(upstream)

    @abstractmethod
    def writer(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        """The writer of the reply `msg_id`, which is `upstream_id` on the engine."""


class ChatDialect(Dialect):
    path, prefix = CHAT, "chatcmpl-"

    async def to_upstream(self, body: Json, caller: Caller) -> Json:
        flag_of(body, "logprobs")  # refused before it is queued, as vLLM refuses it
        return body

    def capture_fields(self, upstream: Mapping[str, Any]) -> Mapping[str, object]:
        # What is invalid without logprobs must not become valid because we add them.
        invalid = not upstream.get("logprobs") and (upstream.get("top_logprobs") or upstream.get("logprob_token_ids"))
        return {} if invalid else vllm.CAPTURE

    def writer(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        requested = RequestedFields(flag_of(body, "logprobs"), flag_of(body, "return_token_ids"))
        transcript = ChatTranscript(msg_id, requested)
        return ReplyWriter(transcript, None if any(requested) else TokenPieces(transcript))


class TextDialect(Dialect):
    path, prefix = TEXT, "cmpl-"
    upstream_path, upstream_prefix = TEXT, "cmpl-"
    length_field = None

    def capture_fields(self, upstream: Mapping[str, Any]) -> Mapping[str, object]:
        invalid = upstream.get("logprobs") is None and upstream.get("logprob_token_ids")
        # With token ids vLLM does not echo the prompt's text, and with log-probabilities it returns the prompt's too.
        return {} if invalid or flag_of(upstream, "echo") else vllm.CAPTURE_TEXT

    def count_choices(self, upstream: Json) -> int:
        prompt = upstream.get("prompt")
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        found = choice_count(upstream) * (len(prompt) if several and prompt else 1)
        if found > MAX_CHOICES:
            raise RequestRefused(f"prompts times n must be at most {MAX_CHOICES}", code="out_of_range", param="prompt")
        return found

    def writer(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        # Nothing is captured of an echo, which has the prompt's token ids whether or not they are requested.
        echo = flag_of(body, "echo")
        requested = RequestedFields(echo or body.get("logprobs") is not None, echo or flag_of(body, "return_token_ids"))
        return ReplyWriter(TextTranscript(msg_id, requested, of_each=choice_count(body)))


class _TranslatedWriter(ReplyWriter):
    """Translates a chat completion into another dialect: `translate` a whole one, `stream` the chunks of one."""

    def __init__(
        self,
        transcript: Transcript,
        translate: Callable[[Json], Json],
        stream: messages.MessageStream | responses_reply.ResponseStream,
    ) -> None:
        super().__init__(transcript)
        self._translate, self._stream = translate, stream

    def convert_whole(self, reply: bytes) -> bytes:
        return orjson.dumps(self._translate(self._with_endings(super().convert_whole(reply))))

    def _convert_data(self, data: bytes) -> bytes:
        chunk = self._view(self.transcript.feed(data))
        return b"" if chunk is None else self._stream.add_chunk(self._with_endings(chunk))

    def _with_endings(self, chat: bytes) -> Json:
        parsed: Json = orjson.loads(chat)
        for choice in parsed.get("choices") or ():
            if choice.get("finish_reason"):
                choice["finish_reason"] = self.transcript.ending_of(choice["index"])
        return parsed

    def finish(self) -> bytes:
        return self._stream.end()


class _MessageWriter(_TranslatedWriter):
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def error_event(self, message: str, code: str) -> bytes:
        kind = code if code == "invalid_request_error" else None
        return b"event: error\ndata: %b\n\n" % orjson.dumps(anthropic_error(message, status=500, kind=kind))

    def convert_error(self, error_body: Json, status: int) -> Json:
        return anthropic_engine_error(error_body, status=status)


class MessagesDialect(Dialect):
    """Anthropic's messages. `thinks`: engines can separate reasoning from the answer, and so end it at a budget."""

    path, prefix = MESSAGES, "msg_"

    def __init__(self, *, thinks: bool = True) -> None:
        self._thinks = thinks

    async def to_upstream(self, body: Json, caller: Caller) -> Json:
        chat = messages.to_chat(body)
        if not self._thinks:  # a budget of nothing: the engine would refuse what Claude Code always asks for
            chat.pop(messages.BUDGET, None)
        return chat

    def left_out(self, body: Json) -> tuple[str, ...]:
        thinking = body.get("thinking") or {}
        budget = () if self._thinks or thinking.get("type") != "enabled" else ("thinking.budget_tokens",)
        return *(f"tools.{each}" for each in messages.anthropic_tools(body)), *budget

    def writer(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        translate = partial(messages.to_message, msg_id=msg_id)
        return _MessageWriter(
            ChatTranscript(upstream_id, RequestedFields()), translate, messages.MessageStream(msg_id=msg_id)
        )


class _ResponseWriter(_TranslatedWriter):
    def error_event(self, message: str, code: str) -> bytes:
        return self._stream.add_chunk({"error": {"message": message, "code": code}})


class ResponsesDialect(Dialect):
    """OpenAI's responses.

    `read_conversation` reads the chat messages up to a tenant's response. A response shows the service's `defaults`
    for fields that the client leaves out, and the engine's context length, which `find_context_length` reads.
    """

    path, prefix = RESPONSES, "resp_"

    def __init__(
        self,
        read_conversation: ReadConversation,
        *,
        defaults: Mapping[str, object],
        find_context_length: Callable[[], Awaitable[int | None]],
    ) -> None:
        self._read_conversation = read_conversation
        self._defaults = defaults
        self._find_context_length = find_context_length
        self._context_length: int | None = None

    def normalize(self, body: Json) -> Json:
        normal = responses_request.normalize(body)
        if normal.get("background"):
            message = "responses in the background are not served: send the request without `background`"
            raise RequestRefused(message, code="invalid_value", param="background")
        return normal

    async def to_upstream(self, body: Json, caller: Caller) -> Json:
        await self._ensure_context()
        previous_id = body.get("previous_response_id")
        previous = await self._read_conversation(previous_id, caller) if isinstance(previous_id, str) else ()
        return responses_request.to_chat(body, previous)

    def left_out(self, body: Json) -> tuple[str, ...]:
        return responses_request.left_out(body)

    def writer(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        body = body | self._missing_defaults(body)
        requested = RequestedFields(logprobs=responses_request.wants_logprobs(body))
        identity: dict[str, Any] = {
            "response_id": msg_id,
            "created_at": int(minted_at(msg_id)),
            "context_length": self._context_length,
        }
        translate = partial(responses_reply.to_response, body, **identity)
        return _ResponseWriter(
            ChatTranscript(upstream_id, requested), translate, responses_reply.ResponseStream(body, **identity)
        )

    async def rebuild(self, body: Json, reply: Json, msg_id: str) -> Json:
        await self._ensure_context()
        return responses_reply.to_response(
            body | self._missing_defaults(body),
            reply,
            response_id=msg_id,
            created_at=int(minted_at(msg_id)),
            context_length=self._context_length,
        )

    def _missing_defaults(self, body: Json) -> Json:
        return {name: value for name, value in self._defaults.items() if body.get(name) is None}

    async def _ensure_context(self) -> None:
        self._context_length = await self._find_context_length()


def choice_count(body: Json) -> int:
    value = body.get("n")
    count = 1 if value is None else coerce_int(value, "n") or 1  # the engine refuses 0
    if not 1 <= count <= MAX_CHOICES:
        raise RequestRefused(f"n must be an integer from 1 to {MAX_CHOICES}", code="out_of_range", param="n")
    return count


def split_events(buffer: bytearray, block: bytes) -> list[bytes]:
    """The server-sent events that a block completes, without their blank line; the rest stays in `buffer`."""
    if buffer:
        buffer += block
        block = bytes(buffer)
        buffer.clear()
    events = block.split(b"\n\n")
    if rest := events.pop():
        buffer += rest
        if len(buffer) > _MAX_EVENT_BYTES:
            raise EngineError(f"an event of more than {_MAX_EVENT_BYTES} bytes")
    return events


_MAX_EVENT_BYTES = 16 << 20


_SYSTEM = "system"
_INSTRUCTING = (_SYSTEM, "developer")

#: For so many seconds an answer is trusted: engines of others may be started again with another template.
_TRUSTED_S = 60.0
_ASKING_TIMEOUT_S = 5.0

#: A turn of an instruction, and the same turn with a longer one: in the prompt they differ, unless it is not there.
_SHORT, _LONG = "Yes.", "Yes. 1 2 3"
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

#: No thinking budget is larger.
_NO_LIMIT = 1 << 62


class _Shape(NamedTuple):
    """Where a conversation has instructions: the first turn's role, if it instructs, and those of later turns."""

    first: str
    later: tuple[str, ...]
    tools: bool


class SystemTurns:
    """Merges instructions that the engines' chat template would lose into the first system message.

    Of `developer` turns and of later `system` turns some templates raise, and others skip them without a word. An
    engine is asked what its template makes of such turns: those that are in the prompt are left as they are.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[_Shape, tuple[float, bool | None]] = {}

    async def merge(self, body: Json) -> tuple[Json, int]:
        """The engine's body, and how many turns were merged. Raises RequestRefused where none reaches the prompt."""
        own = "messages" if "messages" in body else "input"
        turns = body.get(own)
        if not isinstance(turns, list) or not all(isinstance(each, dict) for each in turns):
            return body, 0
        if own == "input" and body.get("instructions"):
            turns = [{"role": _SYSTEM, "content": body["instructions"]}, *turns]
        merged, count = await self._merge(body, turns)
        if not count:
            return body, 0
        return {name: value for name, value in body.items() if name != "instructions"} | {own: merged}, count

    async def merge_counted(self, body: Json) -> tuple[Json, int]:
        """The same of a request that counts the tokens of Anthropic's messages."""
        if messages.anthropic_tools(body):
            body = body | {"tools": messages.own_tools(body)}
        turns = body.get("messages")
        if not isinstance(turns, list) or not any(
            isinstance(each, dict) and each.get("role") == _SYSTEM for each in turns
        ):
            return body, 0
        chat = messages.to_chat({**body, "max_tokens": _NO_LIMIT})
        merged, count = await self._merge(chat, chat["messages"])
        if not count:
            return body, 0
        others: list[Json] = []
        for turn in turns:
            if turn["role"] != _SYSTEM:
                others.append(turn)
            elif isinstance(turn["content"], list):  # of a system turn what it changes of the tools
                changes = [block for block in turn["content"] if block["type"] != "text"]
                others += [turn | {"content": changes}] if changes else []
        return body | {"system": merged[0]["content"], "messages": others}, count

    async def _merge(self, body: Json, turns: Sequence[Json]) -> tuple[list[Json], int]:
        # None where the only instruction is the first system message, if any.
        tools = bool(body.get("tools"))
        roles = [turn.get("role") for turn in turns]
        first = roles[0] if roles and roles[0] in _INSTRUCTING else ""
        later = tuple(each for each in _INSTRUCTING if each in roles[1:])
        shape = _Shape(first, later, tools) if later or first not in ("", _SYSTEM) else None
        if shape is None or await self._reaches(shape):
            return [], 0
        merged = _with_one_system(turns)
        if merged and await self._reaches(_Shape(_SYSTEM, (), shape.tools)) is False:
            raise RequestRefused(
                "the model's chat template has no place for instructions: write them into a user message",
                code="instructions_not_in_prompt",
                param="messages",
            )
        return merged, len(turns) + (shape.first != _SYSTEM) - len(merged) if merged else 0

    async def _reaches(self, shape: _Shape) -> bool | None:
        """Whether all instructions are in the prompt, as was last known; None: refused, or no engine was asked."""
        until, found = self._known.get(shape, (0.0, None))
        engine = least_busy(self._fleet.engines)
        if engine is None or time.monotonic() < until:
            return found
        try:
            async with asyncio.timeout(_ASKING_TIMEOUT_S):
                # The same of one engine; False too where it merges them itself, which the client would not see
                # client. Raises EngineError.
                roles = [*filter(None, [shape.first]), "user", *shape.later, *(["user"] if shape.later else [])]
                short = [{"role": role, "content": _SHORT} for role in roles]
                longer = [
                    [*short[:place], {"role": role, "content": _LONG}, *short[place + 1 :]]
                    for place, role in enumerate(roles)
                    if role != "user"
                ]
                merged = [_with_one_system(short)] if len(longer) > 1 or shape.first != _SYSTEM else []
                read = await asyncio.gather(
                    *(_prompt_ids(engine, turns, shape.tools) for turns in (short, *longer, *merged))
                )
                found = None if None in read else read[0] not in read[1:]
        except (EngineError, TimeoutError):
            return found
        self._known[shape] = (time.monotonic() + _TRUSTED_S, found)
        return found


def with_readable_calls(chat: Json) -> tuple[Json, list[str]]:
    """The chat, in whose earlier calls an engine can read all arguments, and where it has others than were sent."""
    turns, found = chat.get("messages"), list[str]()
    if not isinstance(turns, list) or not any(isinstance(turn, dict) and turn.get("tool_calls") for turn in turns):
        return chat, found

    def readable(value: Any, place: str) -> Any:
        if isinstance(value, list):
            return [readable(each, f"{place}[{number}]") for number, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        inner = {name: readable(value[name], f"{place}.{name}") for name in ("tool_calls", "function") if name in value}
        if isinstance(written := value.get("arguments"), str) and written and not _is_json(written):
            found.append(f"{place}.arguments")
            inner["arguments"] = orjson.dumps({"arguments": written}).decode()
        return value | inner

    mended = readable(turns, "messages")
    return (chat | {"messages": mended} if found else chat), found


def _is_json(written: str) -> bool:
    """Whether the engine can read it; the fast reader, which knows no NaN, is asked first: histories are long."""
    for read in (orjson.loads, json.loads):
        with suppress(ValueError):
            read(written)
            return True
    return False


def merged_header(count: int) -> list[tuple[bytes, bytes]]:
    return [(b"x-tuneloop-merged-system", b"%d" % count)] if count else []


def _with_one_system(turns: Sequence[Json]) -> list[Json]:
    """The turns with one system message, the first; none where the engine refuses what one of them says."""
    texts: list[str] = []
    for turn in turns:
        if turn.get("role") in _INSTRUCTING:
            content = turn.get("content") or ""
            parts = [{"text": content}] if isinstance(content, str) else content
            if not isinstance(parts, list):
                return []
            texts.append("\n".join(_text_of_part(part) for part in parts))
    system = {"role": _SYSTEM, "content": "\n\n".join(filter(None, texts))}
    return [system, *(turn for turn in turns if turn.get("role") not in _INSTRUCTING)]


def _text_of_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if isinstance(text, str):
        return text
    raise RequestRefused(
        "the model's chat template takes one system message, of text: an instruction here is more than text",
        code="unsupported",
        param="messages",
    )


async def _prompt_ids(engine: Engine, turns: Sequence[Json], tools: bool) -> list[int] | None:
    """What the engine reads of a conversation, None where it refuses it. Raises EngineError."""
    body = {"messages": turns} | ({"tools": [_TOOL]} if tools else {})
    headers = {"Content-Type": "application/json"}
    reply = await engine.http.request("POST", "/tokenize", orjson.dumps(body), headers)
    try:
        answer = await reply.read()
    finally:
        reply.close()
    if reply.status == 400:
        return None
    try:
        found: list[int] = orjson.loads(answer)["tokens"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise EngineError(f"/tokenize: its answer cannot be read (status {reply.status})") from None
    return found
