"""Replies whose log-probabilities are packed are the same experiences, and clients see nothing of it."""

import json
from array import array
from base64 import b64encode
from typing import Any

import pytest

from tests.doubles.engine import pieces, recorded
from tuneloop.explorer.capture.sampling import Sampling
from tuneloop.explorer.capture.transcript import ChatTranscript, RequestedFields, TextTranscript, Transcript
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
