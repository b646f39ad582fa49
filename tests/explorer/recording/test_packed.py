"""Replies whose log-probabilities are packed are the same experiences, and clients see nothing of it."""

import json
import math
from array import array
from base64 import b64encode
from typing import Any

import pytest

from tests.doubles.engine import pieces, recorded
from tuneloop.explorer.transcript import ChatTranscript, RequestedFields, Sampling, TextTranscript, Transcript
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
