"""Pieces that hold tokens only are read as the transcript reads them, and hold nothing that it would have refused."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.doubles.engine import pieces, recorded
from tests.explorer.recording.test_packed import pack, packed
from tuneloop.explorer.dialects.dialect import ReplyWriter
from tuneloop.explorer.transcript import ChatTranscript, RequestedFields, Sampling, TokenPieces

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
