"""Replies whose log-probabilities are packed are the same experiences, and clients see nothing of it."""

import json
import math
from array import array
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

from tests.doubles.engine import pieces, recorded
from tuneloop.explorer.dialects.dialect import ReplyWriter
from tuneloop.explorer.transcript import (
    ChatTranscript,
    RequestedFields,
    Sampling,
    TextTranscript,
    TokenPieces,
    Transcript,
)
from tuneloop.shared.experience import Experience

KINDS = ["whole_captured.json", "whole_tools_captured.json", "stream_captured.sse", "stream_n2_captured.sse"]


def replies(name: str) -> list[dict[str, Any]]:
    """The decoded pieces of a recording."""
    data = recorded(name)
    events = [data] if name.endswith(".json") else [each.removeprefix(b"data: ").strip() for each in pieces(data)]
    return [json.loads(each) for each in events if each != b"[DONE]"]


def packed(logprobs: list[float]) -> dict[str, Any]:
    return {"content": None, "packed": b64encode(array("f", logprobs).tobytes()).decode()}


def pack(piece: dict[str, Any]) -> dict[str, Any]:
    """The piece as an engine with our plugin says it."""
    for choice in piece["choices"]:
        if choice.get("logprobs"):
            choice["logprobs"] = packed([each["logprob"] for each in choice["logprobs"]["content"]])
    return piece


def hear(found: Transcript, piece: dict[str, Any]) -> Any:
    view = found.feed(json.dumps(piece, separators=(",", ":")).encode())
    return None if view is None else json.loads(view)


def experiences(found: Transcript) -> tuple[Experience, ...]:
    return found.experiences(Sampling(1.0), versions=(3, 3), mixed=False)


@pytest.mark.parametrize("name", KINDS)
def test_a_packed_reply_is_the_same_experience_and_the_same_to_its_client(name: str) -> None:
    plain, short = (ChatTranscript("chatcmpl-recorded", RequestedFields()) for _ in range(2))
    assert [hear(plain, each) for each in replies(name)] == [hear(short, pack(each)) for each in replies(name)]
    assert experiences(plain) == experiences(short)
    assert experiences(short)[0].logprobs


def test_packed_numbers_of_a_text_are_taken_down_and_not_shown() -> None:
    logprobs = [-0.5, -1.25, -3.0]
    told = {"tokens": [], "token_logprobs": [], **packed(logprobs)}
    choice = {"index": 0, "text": "abc", "logprobs": told, "finish_reason": "length"}
    piece = {"id": "cmpl-x", "choices": [{**choice, "token_ids": [1, 2, 3], "prompt_token_ids": [7]}]}
    found = TextTranscript("cmpl-x", RequestedFields())
    assert hear(found, piece)["choices"][0]["logprobs"] is None
    assert experiences(found)[0].logprobs == array("f", logprobs).tobytes()


@pytest.mark.parametrize("told", ["AAAA", "no base64!", "AAAAAA=="])
def test_numbers_that_were_cut_are_not_trained_on(told: str) -> None:
    found, (reply,) = ChatTranscript("x", RequestedFields()), replies("whole_captured.json")
    reply["choices"][0]["logprobs"] = {"packed": told}
    hear(found, reply)
    assert experiences(found)[0].drop_reason == "no_token_ids"


def stream(*pieces: tuple[list[int], list[float] | None, str | None]) -> Experience:
    """What is recorded of a stream of these tokens, log-probabilities and reasons to finish."""
    found = ChatTranscript("x", RequestedFields())
    for ids, logprobs, reason in pieces:
        told = None if logprobs is None else packed(logprobs)
        choice = {"index": 0, "delta": {"content": "a"}, "logprobs": told, "finish_reason": reason, "token_ids": ids}
        hear(found, {"id": "x", "prompt_token_ids": [5], "choices": [choice]})
    return experiences(found)[0]


def test_the_log_probabilities_of_a_stream_may_come_with_later_tokens() -> None:
    at_once = stream(([1], [-0.5], None), ([2, 3], [-1.5, -2.5], None), ([4], [-3.5], "stop"))
    later = stream(([1], None, None), ([2, 3], [-0.5, -1.5, -2.5], None), ([4], [-3.5], "stop"))
    at_last = stream(([1], None, None), ([2, 3], None, None), ([4], [-0.5, -1.5, -2.5, -3.5], "stop"))
    assert at_once == later == at_last
    assert at_once.drop_reason is None


@pytest.mark.parametrize("came", [None, [], [-0.5], [-0.5] * 5])
def test_a_stream_whose_tokens_and_log_probabilities_differ_in_number_is_not_trained_on(
    came: list[float] | None,
) -> None:
    found = stream(([1], None, None), ([2, 3], None, None), ([4], came, "stop"))
    assert found.drop_reason == "no_token_ids"
    assert len(found.logprobs) == len(found.completion_ids) == 4 * 4


def test_of_a_stream_that_was_cut_off_all_tokens_are_kept() -> None:
    found = stream(([1], None, None), ([2], [-0.5, -1.5], None), ([3, 4], None, None))
    assert found.drop_reason == "cut_off"
    assert list(array("i", found.completion_ids)) == [1, 2, 3, 4]
    kept = array("f", found.logprobs)
    assert kept[:2] == array("f", [-0.5, -1.5])
    assert all(map(math.isnan, kept[2:]))


# Pieces that hold tokens only are read as the transcript reads them.


ID = "chatcmpl-recorded"
RECORDINGS = ["stream_captured.sse", "stream_n2_captured.sse", "stream_tools_captured.sse"]


def encoded(piece: dict[str, Any]) -> bytes:
    return json.dumps(piece, separators=(",", ":"), ensure_ascii=False).encode()


def events(name: str) -> Iterator[bytes]:
    """The events of a recording, as an engine with our plugin sends them."""
    for each in pieces(recorded(name)):
        data = each.removeprefix(b"data: ").strip()
        yield b"data: %b\n\n" % (data if data == b"[DONE]" else encoded(pack(json.loads(data))))


def writer(*, quick: bool = True, captured: bool = True) -> ReplyWriter:
    transcript = ChatTranscript(ID, RequestedFields())
    transcript.captured = captured
    return ReplyWriter(transcript, TokenPieces(transcript) if quick else None)


def heard(found: ReplyWriter) -> Any:
    return found.transcript.experiences(Sampling(1.0), versions=(1, 1), mixed=False)


def token(choice: dict[str, Any] | None = None, **more: Any) -> bytes:
    told = {"index": 0, "delta": {"content": "a"}, "logprobs": packed([-1.0]), "finish_reason": None, "token_ids": [7]}
    head = {"id": ID, "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return encoded({**head, "choices": [told | (choice or {})], **more})


def quick_reader() -> tuple[ChatTranscript, TokenPieces]:
    transcript = ChatTranscript(ID, RequestedFields())
    tokens = TokenPieces(transcript)
    transcript.feed(token())
    tokens.learn(token())
    return transcript, tokens


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("size", [0, 1, 100, 1 << 20])
def test_a_stream_is_the_same_read_either_way(name: str, size: int) -> None:
    stream = b"".join(events(name))
    blocks = [stream[at : at + size] for at in range(0, len(stream), size)] if size else list(events(name))
    quick, slow = writer(), writer(quick=False)
    assert b"".join(map(quick.convert_block, blocks)) == b"".join(map(slow.convert_block, blocks))
    assert heard(quick) == heard(slow)
    assert quick.done
    assert heard(quick)[0].logprobs


@pytest.mark.parametrize(
    "piece",
    [
        token(),
        token({"delta": {"content": "é€😀 [DONE]"}}),
        token({"delta": {"content": ""}}),
        token({"delta": {}}),
        token({"delta": {"reasoning": "because"}}),
        token({"token_ids": [1, 0, 4294967], "logprobs": packed([-1.0, -0.0, -2.5])}),
        token({"token_ids": [1, 2]}),
        token({"logprobs": None}),
        token({"logprobs": {"content": None, "packed": ""}}),
        token({"token_ids": [9_999_999_999]}),
    ],
)
@pytest.mark.parametrize("captured", [True, False])
def test_what_is_read_is_what_the_transcript_reads(piece: bytes, captured: bool) -> None:
    found, slow = writer(captured=captured), writer(quick=False, captured=captured)
    for each in (found, slow):
        each.convert_event(b"data: " + token())
    assert found.convert_event(b"data: " + piece) == slow.convert_event(b"data: " + piece)
    assert repr(found.transcript.choices) == repr(slow.transcript.choices)


@pytest.mark.parametrize(
    "piece",
    [
        token({"index": 1}),
        token({"finish_reason": "stop"}),
        token({"delta": {"content": "a\nb"}}),
        token({"delta": {"content": 'say "so"'}}),
        token({"delta": {"content": "a", "tool_calls": []}}),
        token({"logprobs": {"content": [{"token": "a", "logprob": -1.0}]}}),
        token({"logprobs": {"content": None, "packed": "AAA"}}),
        token({"logprobs": {"content": None, "packed": "AAAA"}}),
        token({"token_ids": None}),
        token({"stop_reason": None}),
        token(usage={"total_tokens": 5}),
        token(error={"message": "no"}),
        token().replace(ID.encode(), b"chatcmpl-another"),
        token().replace(b'"a"', b'"\xff"'),
        token().replace(b"[7]", b"[07]"),
        token()[:-1],
        token() + b" ",
    ],
)
def test_anything_else_is_left_to_the_transcript(piece: bytes) -> None:
    transcript, tokens = quick_reader()
    before = repr(transcript.choices)
    assert tokens.read(piece) is None
    assert repr(transcript.choices) == before


@pytest.mark.parametrize(
    "first",
    [
        token().replace(b'"choices"', b'"usage":{"total_tokens":1},"choices"'),
        token().replace(b'"choices"', b'"error":null,"choices"'),
        b'{"id":"chatcmpl-recorded","x":' + token() + b"}",
        token().replace(ID.encode(), b"chatcmpl-another"),
        b'{"choices":[]}',
    ],
)
def test_a_head_that_says_more_is_not_learnt(first: bytes) -> None:
    tokens = TokenPieces(ChatTranscript(ID, RequestedFields()))
    tokens.learn(first)
    assert tokens.read(first) is None


def test_a_piece_that_cannot_be_read_is_still_an_error() -> None:
    found = writer()
    found.convert_event(b"data: " + token())
    with pytest.raises(UnicodeDecodeError):
        found.convert_event(b"data: " + token().replace(b'"a"', b'"\xff"'))
