"""A reply: its id, and what the engine sends of it.

Names are minted by us and signed: a guess, a typo or another tenant's id is refused without a look-up.

    chatcmpl-<40 characters>      every choice of a reply
    chatcmpl-<40 characters>:<k>  its choice k

Replies of other endpoints have their own prefix, as OpenAI's and Anthropic's have. The 40 characters are base32
(sortable by time) of: 6 bytes of milliseconds since 1970, 9 random bytes, the number of choices, and 9 bytes of
keyed BLAKE2b over these, the tenant, and a prefix that is not `chatcmpl-`. 255 choices or more are counted in the
place of the last 3 random bytes, and their own byte is 255; it is 0 for a reply that is not recorded.

A transcript takes down what vLLM answers, whole or in pieces (it is sans-I/O: a whole reply is one piece). Only what is
kept is decoded, and what the client did not ask for is cut out of the bytes, which pass as they are where they can.
"""

import hashlib
import hmac
import math
import os
import re
import time
from abc import ABC, abstractmethod
from array import array
from binascii import a2b_base64
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from tuneloop.shared.errors import EngineError
from tuneloop.shared.experience import SIGNED, SIGNED_BYTES, Experience, Grammar, ReplyLimit, pack_ids, pack_logprobs

PREFIX = "chatcmpl-"
PREFIXES = (PREFIX, "cmpl-", "resp_", "msg_")
MAX_CHOICES = (1 << 24) - 1

_MAC_BYTES, _MANY, _MANY_BYTES = 9, 255, 3
_CHOICE_DIGITS = len(str(MAX_CHOICES))
_DIGITS, _SHIFTS = "0123456789abcdefghijklmnopqrstuv", range(5 * (SIGNED - 2), -1, -10)
_TWO_DIGITS = [high + low for high in _DIGITS for low in _DIGITS]
_WELL_FORMED = re.compile(f"[0-9a-v]{{{SIGNED}}}").fullmatch


class ParsedReplyId(NamedTuple):
    """A msg_id that is ours, and the choice it names; None means all. `recorded`: its reply is, or was to be."""

    msg_id: str
    choice: int | None
    recorded: bool = True


class ReplyIdSigner:
    """Mints and recognises msg_ids under one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def mint(self, tenant: str, choices: int, prefix: str = PREFIX) -> str:
        """A new msg_id for a reply of `choices` choices (0: it is not recorded); `prefix` is one of PREFIXES."""
        if choices < _MANY:
            counted = os.urandom(9) + bytes([choices])
        else:
            counted = os.urandom(9 - _MANY_BYTES) + choices.to_bytes(_MANY_BYTES) + bytes([_MANY])
        name = (time.time_ns() // 1_000_000).to_bytes(6) + counted
        number = int.from_bytes(name + self._mac(name, tenant, prefix))
        # What base64.b32hexencode makes of 25 bytes, in half its time.
        return prefix + "".join([_TWO_DIGITS[number >> shift & 1023] for shift in _SHIFTS])

    def parse(self, text: str, tenant: str) -> ParsedReplyId | None:
        """What `text` names, or None if we never minted it for this tenant."""
        msg_id, colon, choice = text.partition(":")
        prefix = next((each for each in PREFIXES if msg_id.startswith(each)), "")
        signed = msg_id[len(prefix) :].lower()
        prefix = prefix or PREFIX
        if not _WELL_FORMED(signed):
            return None
        data = int(signed, 32).to_bytes(SIGNED_BYTES)  # tens of times faster than b32hexdecode, whose digits these are
        name, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(name, tenant, prefix)):
            return None
        msg_id = prefix + signed
        if not colon or not name[-1]:
            return ParsedReplyId(msg_id, None, recorded=bool(name[-1]))
        if not (choice.isascii() and choice.isdigit() and len(choice) <= _CHOICE_DIGITS):
            return None
        if int(choice) >= (int.from_bytes(name[-1 - _MANY_BYTES : -1]) if name[-1] == _MANY else name[-1]):
            return None
        return ParsedReplyId(msg_id, int(choice))

    def _mac(self, name: bytes, tenant: str, prefix: str) -> bytes:
        whose = f"{tenant}\0{prefix}" if prefix != PREFIX else tenant
        # A MAC as HMAC is one, at a fifth of its price.
        return hashlib.blake2b(name + whose.encode(), key=self._key, digest_size=_MAC_BYTES).digest()


_LARGEST = 3.4e38  # of a float32
_NULL, _ID_BYTES = b"null", 4
_ABSENT = msgspec.Raw(_NULL)


class _ChatPiece(msgspec.Struct, gc=False):
    id: str = ""
    choices: list["_ChatChoice"] = []
    prompt_token_ids: msgspec.Raw = _ABSENT
    usage: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT


class _ChatChoice(msgspec.Struct, gc=False):
    index: int
    message: msgspec.Raw = _ABSENT
    delta: msgspec.Raw = _ABSENT
    logprobs: msgspec.Raw = _ABSENT
    token_ids: msgspec.Raw = _ABSENT
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _ChatDelta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Token(msgspec.Struct, gc=False):
    logprob: float


class _ChatLogprobs(msgspec.Struct, gc=False):
    content: list[_Token] | None = None
    packed: bytes | None = None
    kept: bytes = b""
    kept_ids: bytes = b""

    @property
    def of_tokens(self) -> Sequence[float]:
        return _unpack(self.packed) if self.packed is not None else [each.logprob for each in self.content or ()]


class _TextPiece(msgspec.Struct):
    id: str = ""
    choices: list["_TextChoice"] = []
    usage: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT


class _TextChoice(msgspec.Struct):
    index: int
    text: str = ""
    logprobs: msgspec.Raw = _ABSENT
    token_ids: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT
    finish_reason: str | None = None


class _TextLogprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    packed: bytes | None = None
    kept: bytes = b""
    kept_ids: bytes = b""

    @property
    def of_tokens(self) -> Sequence[float | None]:
        return _unpack(self.packed) if self.packed is not None else self.token_logprobs


class _Usage(msgspec.Struct):
    total_tokens: int = 0
    completion_tokens_details: dict[str, Any] | None = None


_chat_pieces = msgspec.json.Decoder(_ChatPiece)
_text_pieces = msgspec.json.Decoder(_TextPiece)
_chat_delta = msgspec.json.Decoder(_ChatDelta | None)
_usage = msgspec.json.Decoder(_Usage | None)
_ids = msgspec.json.Decoder(list[int] | None)
_chat_logprobs = msgspec.json.Decoder(_ChatLogprobs | None)
_text_logprobs = msgspec.json.Decoder(_TextLogprobs | None)


@dataclass(slots=True)
class CapturedChoice:
    prompt_ids: bytes | None = None
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: bytearray = field(default_factory=bytearray)
    kept_ids: bytearray = field(default_factory=bytearray)
    text: list[str] = field(default_factory=list)
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    stopped: bool = False
    unreadable: bool = False

    def take_down(self, ids: Sequence[int] | None, logprobs: Sequence[float], *, captured: bool) -> None:
        """Add tokens, and log-probabilities of these or earlier ones; NaN stands for them if none is `captured`."""
        if not captured and not logprobs:
            logprobs = [math.nan] * len(ids or ())
        self.completion_ids += ids or ()
        self.logprobs += logprobs

    def under_mask(self, sampling: "Sampling") -> "Sampling":
        """How it was sampled, by what the engine says of the tokens that truncation left."""
        if len(self.kept) != _ID_BYTES * len(self.completion_ids):
            return sampling
        counts = np.frombuffer(self.kept, "<i4")
        if int(counts.sum()) * _ID_BYTES != len(self.kept_ids):
            return sampling
        if not counts.all():
            return sampling._replace(unsampled="sampling:mask_too_large")
        mask = Grammar(kind="tokens", spec="", sets=bytes(self.kept + self.kept_ids))
        return sampling._replace(unsampled=None, grammar=mask)

    def logprob_per_token(self) -> list[float]:
        count = len(self.completion_ids)
        return self.logprobs[:count] + [math.nan] * (count - len(self.logprobs))


class Sampling(NamedTuple):
    """How a reply is sampled: its temperature, why it is no sample of the policy, and why nothing can learn from it.

    `by_grammar`: it is none only for a grammar. Of which the engine knows, and with the `grammar` it is a sample again.
    `truncated`: it is none only for what `top_p`, `top_k` or `min_p` cut off, and again one among the tokens left.
    `budget`: the tokens of reasoning after which the engine ends it; a reply that has fewer is sampled without it.
    """

    temperature: float
    unsampled: str | None = None
    drop_reason: str | None = None
    by_grammar: bool = False
    grammar: Grammar | None = None
    truncated: bool = False
    budget: int | None = None


class RequestedFields(NamedTuple):
    logprobs: bool = False
    token_ids: bool = False


class Transcript(ABC):
    """One reply as it comes, with the id `msg_id`. `captured`: the engine was asked for its log-probabilities."""

    captured = True
    limit: ReplyLimit | None = None

    def __init__(self, msg_id: str, wants: RequestedFields) -> None:
        self.choices: dict[int, CapturedChoice] = {}
        self.broken = False
        #: The tokens of prompts and choices, and of their reasoning, as the engine counts them; nothing before it does.
        self.reported_tokens = 0
        self.reasoning_tokens: int | None = None
        self.msg_id = msg_id
        self._wants = wants

    def feed(self, piece: bytes) -> bytes | None:
        """Take down one piece of JSON; what the client gets of it, None for nothing. Raises EngineError."""
        try:
            return self._feed(piece)
        except (msgspec.DecodeError, orjson.JSONDecodeError, OverflowError) as error:
            raise EngineError(f"the engine's reply cannot be read: {error!r}") from error

    @abstractmethod
    def _feed(self, piece: bytes) -> bytes | None:
        """The same."""

    @property
    def complete(self) -> bool:
        return not self.broken and bool(self.choices) and all(each.finish_reason for each in self.choices.values())

    @property
    def tokens(self) -> int:
        prompts = sum(len(each) // _ID_BYTES for each in self._prompts())
        return max(self.reported_tokens, prompts + sum(len(each.completion_ids) for each in self.choices.values()))

    def _prompts(self) -> Iterable[bytes]:
        return [max((each.prompt_ids or b"" for each in self.choices.values()), default=b"", key=len)]

    def _take_usage(self, usage: msgspec.Raw) -> None:
        if usage == _ABSENT:
            return
        with suppress(msgspec.ValidationError):  # then the tokens that have come are counted
            if found := _usage.decode(usage):
                self.reported_tokens = max(self.reported_tokens, found.total_tokens)
                if found.completion_tokens_details:
                    self.reasoning_tokens = found.completion_tokens_details.get("reasoning_tokens")

    def experiences(self, sampling: Sampling, *, versions: tuple[int, int], mixed: bool) -> tuple[Experience, ...]:
        found = []
        for index, choice in sorted(self.choices.items()):
            ids = _pack(choice.completion_ids)
            calls = [call for _, call in sorted(choice.tool_calls.items())]
            reason = self._why_not_trainable(choice, ids)
            how = choice.under_mask(sampling) if sampling.truncated and not mixed else sampling
            found.append(
                Experience(
                    choice=index,
                    prompt_ids=choice.prompt_ids or b"",
                    completion_ids=ids or b"",
                    logprobs=pack_logprobs(choice.logprob_per_token()) if ids else b"",
                    version_min=min(versions),
                    version_max=max(versions),
                    temperature=sampling.temperature,
                    finish_reason=self.ending_of(index),
                    text="".join(choice.text),
                    tool_calls=orjson.dumps(calls) if calls else None,
                    drop_reason=reason or sampling.drop_reason,
                    unsampled="mixed_version" if mixed else how.unsampled,
                    grammar=None if mixed else how.grammar,
                )
            )
        return tuple(found)

    def ending_of(self, index: int) -> str | None:
        """Why a choice ended: `length` also where the engine calls it otherwise, and its tokens fill the limit."""
        choice = self.choices[index]
        prompt, ids = len(choice.prompt_ids or b"") // _ID_BYTES, choice.completion_ids
        is_cut = self.limit and not choice.stopped and self.limit.cuts(choice.finish_reason, prompt, ids)
        return "length" if is_cut else choice.finish_reason

    def _why_not_trainable(self, choice: CapturedChoice, ids: bytes | None) -> str | None:
        if self.broken or choice.finish_reason in {None, "abort", "error"}:
            return "cut_off"
        unmatched = len(choice.completion_ids) != len(choice.logprobs)
        if choice.unreadable or unmatched or choice.prompt_ids is None or ids is None:
            return "no_token_ids"
        if not ids:
            return "no_token_ids" if any(choice.text) else "empty"
        if not self.captured and all(map(math.isnan, choice.logprobs)):
            return None
        finite = max(choice.logprobs) <= 0 and min(choice.logprobs) >= -_LARGEST
        return None if finite else "logprobs_not_finite"

    def _view(self, piece: bytes, engine_id: str, ours: Iterable[tuple[bytes, msgspec.Raw]]) -> bytes:
        """The piece under our name, where these fields are null."""
        if engine_id == self.msg_id:
            cut = piece
            for key, value in ours:
                cut = _without(cut, key, bytes(value)) if cut else cut
            if cut:
                return cut
        # The same, whatever way the engine writes its JSON.
        parsed = orjson.loads(piece)
        parsed["id"] = self.msg_id
        for holder in (parsed, *parsed.get("choices", ())):  # a chat's prompt ids stand beside its choices
            _forget(holder, "logprobs", unless=self._wants.logprobs)
            _forget(holder, "token_ids", unless=self._wants.token_ids)
            _forget(holder, "prompt_token_ids", unless=self._wants.token_ids)
        return orjson.dumps(parsed)


class ChatTranscript(Transcript):
    def _feed(self, piece: bytes) -> bytes | None:
        parsed = _chat_pieces.decode(piece)
        if parsed.error != _ABSENT:
            self.broken = True
            return piece
        self._take_usage(parsed.usage)
        prompt_ids = _prompt_ids(parsed.prompt_token_ids)
        ours: list[tuple[bytes, msgspec.Raw]] = []
        theirs = 0
        for choice in parsed.choices:
            theirs += self._feed_choice(choice, prompt_ids)
            if not self._wants.logprobs:
                ours.append((b'"logprobs":', choice.logprobs))
            if not self._wants.token_ids:
                ours.append((b'"token_ids":', choice.token_ids))
        if parsed.choices and not theirs:
            return None
        if not self._wants.token_ids:
            ours.append((b'"prompt_token_ids":', parsed.prompt_token_ids))
        return self._view(piece, parsed.id, ours)

    def _feed_choice(self, update: _ChatChoice, prompt_ids: bytes | None) -> bool:
        """Take down one choice; False if the client would not have got this piece of it."""
        choice = self.choices.get(update.index) or self.choices.setdefault(update.index, CapturedChoice())
        choice.prompt_ids = prompt_ids if prompt_ids is not None else choice.prompt_ids
        streamed = update.message == _ABSENT
        if delta := _chat_delta.decode(update.delta if streamed else update.message):
            if delta.content:
                choice.text.append(delta.content)
            if delta.tool_calls:
                _add_tool_calls(choice.tool_calls, delta.tool_calls)
        choice.finish_reason = update.finish_reason or choice.finish_reason
        choice.stopped = choice.stopped or update.stop_reason is not None
        try:
            ids, found = _ids.decode(update.token_ids), _chat_logprobs.decode(update.logprobs)
            choice.take_down(ids, found.of_tokens if found else (), captured=self.captured)
            if found:
                choice.kept += found.kept
                choice.kept_ids += found.kept_ids
        except msgspec.ValidationError:
            choice.unreadable = True
        only_ours = streamed and update.finish_reason is None and bytes(update.delta) == b"{}"
        return not only_ours or any(self._wants)


class TextTranscript(Transcript):
    """The reply to a completion of text: `of_each` choices of each of its prompts."""

    def __init__(self, msg_id: str, wants: RequestedFields, *, of_each: int = 1) -> None:
        super().__init__(msg_id, wants)
        self._of_each = of_each

    def _prompts(self) -> Iterable[bytes]:
        return {index // self._of_each: each.prompt_ids or b"" for index, each in self.choices.items()}.values()

    def _feed(self, piece: bytes) -> bytes | None:
        parsed = _text_pieces.decode(piece)
        if parsed.error != _ABSENT:
            self.broken = True
            return piece
        self._take_usage(parsed.usage)
        ours: list[tuple[bytes, msgspec.Raw]] = []
        for choice in parsed.choices:
            self._feed_choice(choice)
            if not self._wants.logprobs:
                ours.append((b'"logprobs":', choice.logprobs))
            if not self._wants.token_ids:
                ours.append((b'"token_ids":', choice.token_ids))
                ours.append((b'"prompt_token_ids":', choice.prompt_token_ids))
        return self._view(piece, parsed.id, ours)

    def _feed_choice(self, update: _TextChoice) -> None:
        choice = self.choices.get(update.index) or self.choices.setdefault(update.index, CapturedChoice())
        if (prompt_ids := _prompt_ids(update.prompt_token_ids)) is not None:
            choice.prompt_ids = prompt_ids
        if update.text:
            choice.text.append(update.text)
        choice.finish_reason = update.finish_reason or choice.finish_reason
        try:
            ids, found = _ids.decode(update.token_ids), _text_logprobs.decode(update.logprobs)
            logprobs = found.of_tokens if found else ()
            if found and found.packed is None and ids is not None and len(logprobs) != len(ids):
                # With `echo` the prompt's come first, and the very first has none.
                logprobs = logprobs[len(choice.prompt_ids or b"") // _ID_BYTES :]
            choice.take_down(ids, [each for each in logprobs if each is not None], captured=self.captured)
            if found:
                choice.kept += found.kept
                choice.kept_ids += found.kept_ids
        except msgspec.ValidationError:
            choice.unreadable = True


def _prompt_ids(ids: msgspec.Raw) -> bytes | None:
    """Token ids as int32 bytes, None where there are none, or what cannot be any."""
    if ids == _ABSENT:
        return None
    try:
        found = orjson.loads(memoryview(ids))  # in three quarters of msgspec's time, and there may be thousands
    except orjson.JSONDecodeError:
        return None
    return _pack(found) if isinstance(found, list) else None


def _pack(ids: Sequence[Any]) -> bytes | None:
    """Token ids as int32 bytes; None if some are none."""
    try:
        data = pack_ids(ids)
    except (OverflowError, TypeError):
        return None
    return data if data[3::4].isascii() else None  # none is negative


def _unpack(numbers: bytes) -> Sequence[float]:
    """The numbers that these are, as float32. Raises ValidationError."""
    found = array("f")
    try:
        found.frombytes(numbers)
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from error
    return found


def _without(piece: bytes, key: bytes, value: bytes) -> bytes:
    """The piece with null for a key's value; nothing if it is not written so. In strings, quotes have backslashes."""
    if value == _NULL:
        return piece
    at = piece.find(key)
    while at >= 0:
        at += len(key)
        if piece.startswith(value, at):
            return b"%b%b%b" % (piece[:at], _NULL, piece[at + len(value) :])
        at = piece.find(key, at)
    return b""


def _forget(fields: dict[str, Any], key: str, *, unless: bool) -> None:
    if key in fields and not unless:
        fields[key] = None


def _add_tool_calls(calls: dict[int, dict[str, Any]], deltas: Iterable[dict[str, Any]]) -> None:
    for position, piece in enumerate(deltas):
        index = piece.get("index")
        call = calls.setdefault(position if index is None else int(index), {})
        call |= {key: value for key, value in piece.items() if key not in {"index", "function"} and value is not None}
        function = call.setdefault("function", {})
        for key, value in (piece.get("function") or {}).items():
            if key == "arguments":
                function[key] = function.get(key, "") + (value or "")
            elif value is not None:
                function[key] = value


_BEFORE_CHOICES = b'"choices":[{"index":'
_ID = rb"(?:0|[1-9]\d{0,9})"

#: What follows `_BEFORE_CHOICES`: index, field, text, log-probabilities, the same packed, ids.
_TOKEN_PIECE = re.compile(
    rb'(0|[1-9]\d{0,6}),"delta":\{(?:"(content|reasoning|reasoning_content)":"([^"\\\x00-\x1f]*)")?\},'
    rb'"logprobs":(null|\{"content":null,"packed":"([^"\\\x00-\x1f]*)"\}),'
    rb'"finish_reason":null,"token_ids":\[(%b(?:,%b)*)\]\}\]\}' % (_ID, _ID)
)


class _PieceHead(msgspec.Struct, forbid_unknown_fields=True):
    """A piece without its choices."""

    id: str
    object: str
    created: int
    model: str
    choices: list[None]
    system_fingerprint: str | None = None


_piece_heads = msgspec.json.Decoder(_PieceHead)


class TokenPieces:
    """Reads the pieces of one stream that hold tokens and nothing else, which is nearly all, without parsing JSON.

    What such a piece begins with is the same in all of a stream, and is learnt from the first one that the transcript
    has read. What an engine writes in any other way, the transcript reads. The client gets neither ids nor
    log-probabilities.
    """

    def __init__(self, transcript: ChatTranscript) -> None:
        self._transcript = transcript
        self._start = b""

    def learn(self, piece: bytes) -> None:
        if self._start:
            return
        head, found, _ = piece.partition(_BEFORE_CHOICES)
        try:
            named = _piece_heads.decode(head + b'"choices":[]}').id
        except msgspec.DecodeError:
            return
        if found and named == self._transcript.msg_id:
            self._start = head + found

    def read(self, piece: bytes) -> bytes | None:
        """Take down a piece that holds tokens only; what the client gets of it. None if it holds anything else."""
        start = self._start
        if not start or not piece.startswith(start) or (found := _TOKEN_PIECE.fullmatch(piece, len(start))) is None:
            return None
        index, field, text, _, packed, ids = found.groups()
        if (choice := self._transcript.choices.get(int(index))) is None:
            return None
        try:
            said, logprobs = (text or b"").decode(), array("f", a2b_base64(packed or b"", strict_mode=True))
        except ValueError:  # the transcript says what is wrong with it
            return None
        if said and field == b"content":
            choice.text.append(said)
        numbers = [int(ids)] if ids.isdigit() else list(map(int, ids.split(b",")))
        choice.take_down(numbers, logprobs, captured=self._transcript.captured)
        if field is None:
            return b""
        return piece[: found.start(4)] + b'null,"finish_reason":null,"token_ids":null}]}'
