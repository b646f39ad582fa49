"""The ways in which clients ask for a reply: what each becomes for the engine, and how its reply is told to the client.

Chat and text completions pass as they are. Responses and messages carry no token ids in vLLM: they become chat
completions, and those are told as the client's own kind of reply.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

import orjson

from tuneloop.explorer.capture.reply_id import MAX_CHOICES, minted_at
from tuneloop.explorer.capture.transcript import ChatTranscript, RequestedFields, TextTranscript, Transcript
from tuneloop.explorer.dialects import messages, responses_reply, responses_request
from tuneloop.explorer.dialects.messages_stream import MessageStream
from tuneloop.explorer.dialects.responses_stream import ResponseStream
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.http.bodies import flag
from tuneloop.explorer.http.errors import engine_error_body, error_body
from tuneloop.shared.errors import EngineError, RequestRefused

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"

Json = dict[str, Any]


class ReplyWriter:
    """Tells one reply to the client while its transcript takes it down; this one as the engine tells it."""

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript
        #: Whether the engine has said that it is done.
        self.done = False

    def whole(self, reply: bytes) -> bytes:
        """The body that the client gets. Raises EngineError if the reply cannot be read."""
        return self.transcript.feed(reply) or b""

    def event(self, event: bytes) -> bytes:
        """What a server-sent event (without its blank line) becomes; empty if the client would not have got it."""
        if event == b"data: [DONE]":
            self.done = True
            return b""
        if event.startswith(b"data: "):
            return self._piece(event[6:])
        return event + b"\n\n" if event.startswith(b":") else b""  # a comment keeps the connection alive

    def _piece(self, data: bytes) -> bytes:
        told = self.transcript.feed(data)
        return b"" if told is None else b"data: %b\n\n" % told

    @property
    def unfinished(self) -> bool:
        """Whether the engine goes on with the reply by itself, whatever becomes of the client's connection."""
        return False

    def last(self) -> bytes:
        """What the client gets when the engine is done, after the exchange has been kept."""
        return b"data: [DONE]\n\n"

    def broken(self, message: str, code: str) -> bytes:
        """The last event of a reply that broke off."""
        error = {"message": message, "type": "server_error", "param": None, "code": code}
        return b"data: %b\n\n" % orjson.dumps({"error": error})

    def refused(self, told: Json, status: int) -> Json:
        """The engine's refusal, `{"error": {...}}`, as the client knows them."""
        return told


class Dialect(ABC):
    """One endpoint. `path` is where the client asks, `prefix` how the ids of its replies begin."""

    path: ClassVar[str]
    prefix: ClassVar[str]
    #: Where the engine is asked, and how the ids of its replies begin.
    upstream_path: ClassVar[str] = CHAT
    upstream_prefix: ClassVar[str] = "chatcmpl-"
    #: How the engine calls the most tokens of a reply, where those of clients who don't say are bounded.
    length: ClassVar[str | None] = "max_completion_tokens"

    def of(self, body: Json) -> "Dialect":
        """The dialect in which an engine is asked for a client's body: another one where this one cannot say it."""
        return self

    async def asked(self, body: Json) -> Json:
        """What the engine is asked, for a client's body. Raises RequestRefused."""
        return body

    def verbatim(self, asked: Json, msg_id: str) -> Json | None:
        """All that the engine gets, where nothing may be added or left out for its reply to be captured."""
        return None

    def capture(self, asked: Mapping[str, Any]) -> Mapping[str, object]:
        """What is asked of the engine beside what the client asks."""
        return vllm.CAPTURE

    def choices(self, asked: Json) -> int:
        """How many choices the reply will have. Raises RequestRefused."""
        return choices_of(asked)

    @abstractmethod
    def teller(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        """Who tells the reply named `msg_id`, which the engine names `upstream_id`."""


class ChatDialect(Dialect):
    """OpenAI's chat completions."""

    path, prefix = CHAT, "chatcmpl-"

    async def asked(self, body: Json) -> Json:
        """See Dialect."""
        flag(body, "logprobs")
        return body

    def capture(self, asked: Mapping[str, Any]) -> Mapping[str, object]:
        """See Dialect."""
        # What cannot be had without logprobs must not become right because we ask for them.
        wrong = not asked.get("logprobs") and (asked.get("top_logprobs") or asked.get("logprob_token_ids"))
        return {} if wrong else vllm.CAPTURE

    def teller(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        """See Dialect."""
        wants = RequestedFields(body.get("logprobs") is True, body.get("return_token_ids") is True)
        return ReplyWriter(ChatTranscript(msg_id, wants))


class TextDialect(Dialect):
    """OpenAI's older completions of text."""

    path, prefix = TEXT, "cmpl-"
    upstream_path, upstream_prefix = TEXT, "cmpl-"
    length = None

    def capture(self, asked: Mapping[str, Any]) -> Mapping[str, object]:
        """See Dialect."""
        wrong = asked.get("logprobs") is None and asked.get("logprob_token_ids")
        # With token ids vLLM does not echo the prompt's words, and with log-probabilities it tells the prompt's too.
        return {} if wrong or asked.get("echo") else vllm.CAPTURE_TEXT

    def choices(self, asked: Json) -> int:
        """One for each prompt, times n."""
        prompt = asked.get("prompt")
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        found = choices_of(asked) * (len(prompt) if several and prompt else 1)
        if found > MAX_CHOICES:
            raise RequestRefused(f"prompts times n must be at most {MAX_CHOICES}", code="out_of_range", param="prompt")
        return found

    def teller(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        """See Dialect."""
        # Nothing is captured of an echo, which has the prompt's token ids whether or not they are asked for.
        echo = bool(body.get("echo"))
        wants = RequestedFields(echo or body.get("logprobs") is not None, echo or body.get("return_token_ids") is True)
        return ReplyWriter(TextTranscript(msg_id, wants))


class _TranslatedWriter(ReplyWriter):
    """Tells a chat completion in other words."""

    def whole(self, reply: bytes) -> bytes:
        """See Teller."""
        return orjson.dumps(self._reply(orjson.loads(super().whole(reply))))

    def _piece(self, data: bytes) -> bytes:
        told = self.transcript.feed(data)
        return b"" if told is None else self._chunk(orjson.loads(told))

    def _reply(self, reply: Json) -> Json:
        raise NotImplementedError

    def _chunk(self, chunk: Json) -> bytes:
        raise NotImplementedError


class _MessageWriter(_TranslatedWriter):
    def __init__(self, msg_id: str, upstream_id: str) -> None:
        super().__init__(ChatTranscript(upstream_id, RequestedFields()))
        self._msg_id = msg_id
        self._stream = MessageStream(msg_id=msg_id)

    def _reply(self, reply: Json) -> Json:
        return messages.whole(reply, msg_id=self._msg_id)

    def _chunk(self, chunk: Json) -> bytes:
        return self._stream.hear(chunk)

    def last(self) -> bytes:
        """See Teller."""
        return self._stream.end()

    def broken(self, message: str, code: str) -> bytes:
        """See Teller."""
        return b"event: error\ndata: %b\n\n" % orjson.dumps(error_body(message, status=500))

    def refused(self, told: Json, status: int) -> Json:
        """See Teller."""
        return engine_error_body(told, status=status)


class MessagesDialect(Dialect):
    """Anthropic's messages."""

    path, prefix = MESSAGES, "msg_"

    async def asked(self, body: Json) -> Json:
        """See Dialect."""
        return messages.to_chat(body)

    def teller(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        """See Dialect."""
        return _MessageWriter(msg_id, upstream_id)


class _ResponseWriter(_TranslatedWriter):
    def __init__(self, body: Json, msg_id: str, upstream_id: str, context: int | None) -> None:
        super().__init__(ChatTranscript(upstream_id, RequestedFields(logprobs=responses_request.wants_logprobs(body))))
        self._body = body
        self._named: dict[str, Any] = {"response_id": msg_id, "created_at": int(minted_at(msg_id)), "context": context}
        self._stream = ResponseStream(body, **self._named)

    def _reply(self, reply: Json) -> Json:
        return responses_reply.whole(self._body, reply, **self._named)

    def _chunk(self, chunk: Json) -> bytes:
        return self._stream.hear(chunk)

    def last(self) -> bytes:
        """See Teller."""
        return self._stream.end()

    def broken(self, message: str, code: str) -> bytes:
        """See Teller."""
        return self._stream.hear({"error": {"message": message, "code": code}})


class ResponsesDialect(Dialect):
    """OpenAI's responses.

    `conversation` gives the chat messages up to the response of a name. A response tells of what the service decides
    where clients don't say, its `defaults`, and of the engine's longest sequence, which `context` finds out. What
    cannot be put as a chat completion is asked `beyond`.
    """

    path, prefix = RESPONSES, "resp_"

    def __init__(
        self,
        conversation: Callable[[str], Awaitable[Sequence[Json]]],
        *,
        defaults: Mapping[str, object],
        context: Callable[[], Awaitable[int | None]],
        beyond: Dialect,
    ) -> None:
        self._conversation = conversation
        self._defaults = defaults
        self._find_context = context
        self._context: int | None = None
        self._beyond = beyond

    def of(self, body: Json) -> Dialect:
        """See Dialect."""
        return self if responses_request.untranslatable(body) is None else self._beyond

    async def asked(self, body: Json) -> Json:
        """See Dialect."""
        await self._learn_context()
        continued = body.get("previous_response_id")
        previous = await self._conversation(continued) if isinstance(continued, str) else ()
        return responses_request.to_chat(body, previous)

    def teller(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        """See Dialect."""
        return _ResponseWriter(body | self._unsaid(body), msg_id, upstream_id, self._context)

    async def again(self, body: Json, reply: Json, msg_id: str) -> Json:
        """The response that was made of a chat completion, or what is known of it."""
        await self._learn_context()
        return responses_reply.whole(
            body | self._unsaid(body),
            reply,
            response_id=msg_id,
            created_at=int(minted_at(msg_id)),
            context=self._context,
        )

    def _unsaid(self, body: Json) -> Json:
        return {name: value for name, value in self._defaults.items() if body.get(name) is None}

    async def _learn_context(self) -> None:
        if self._context is None:
            self._context = await self._find_context()


def choices_of(body: Json) -> int:
    """`n`. Raises RequestRefused for what is no number of choices."""
    choices = body.get("n") or 1
    if isinstance(choices, bool) or not isinstance(choices, int) or not 1 <= choices <= MAX_CHOICES:
        raise RequestRefused(f"n must be an integer from 1 to {MAX_CHOICES}", code="out_of_range", param="n")
    return choices


def events(rest: bytearray, block: bytes) -> list[bytes]:
    """The server-sent events that a block completes, without their blank line; what is left stays in `rest`."""
    if rest:
        rest += block
        block = bytes(rest)
        rest.clear()
    *whole, left = block.split(b"\n\n")
    rest += left
    if len(rest) > _LONGEST_EVENT:
        raise EngineError(f"an event of more than {_LONGEST_EVENT} bytes")
    return whole


_LONGEST_EVENT = 16 << 20
