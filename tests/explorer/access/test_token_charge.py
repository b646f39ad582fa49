"""What a key's tokens are counted by: nobody has text read or sampled without that it costs them tokens."""

import json
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.access.test_keys import CHAT, MakeKey, code, make_key, secret_of
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.wire import Wire, http_request
from tuneloop.explorer.dialects.responses_native import NativeResponseTranscript
from tuneloop.explorer.limits import BodyLimits, KeyMeter, KeyUsage, RequestMeter
from tuneloop.explorer.transcript import ChatTranscript, RequestedFields, TextTranscript, Transcript
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyLimits

__all__ = ["make_key"]

USAGE = {"prompt_tokens": 400, "completion_tokens": 100, "total_tokens": 500}


def meter_of(body_bytes: int) -> tuple[RequestMeter, KeyUsage]:
    """The meter of a request, and what its key has taken."""
    key = KeyMeter(KeyLimits())
    found = RequestMeter(BodyLimits(), key)
    found.expect(body_bytes=body_bytes, choices=1, most=None)
    return found, key.usage


def fed(transcript: Transcript, piece: dict[str, Any]) -> Transcript:
    transcript.feed(json.dumps(piece).encode())
    return transcript


def text_choice(index: int, prompt: list[int] | None, ids: list[int] | None) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-0.5] * len(ids or ())}
    return {
        "index": index,
        "text": "abcdefgh",
        "finish_reason": "stop",
        "prompt_token_ids": prompt,
        "token_ids": ids,
        "logprobs": logprobs,
    }


def test_each_prompt_of_a_list_is_counted_and_of_several_choices_once() -> None:
    choices = [text_choice(index, [1, 2, 3], [7]) for index in range(6)]
    heard = fed(TextTranscript("cmpl-x", RequestedFields(), of_each=2), {"id": "cmpl-x", "choices": choices})
    assert heard.tokens == 3 * 3 + 6


@pytest.mark.parametrize("usage", [None, 5, {}, {"total_tokens": "many"}, {"total_tokens": -3}])
def test_a_count_that_cannot_be_read_leaves_that_of_the_ids(usage: object) -> None:
    piece = {"id": "cmpl-x", "choices": [text_choice(0, [1, 2, 3], [7])], "usage": usage}
    assert fed(TextTranscript("cmpl-x", RequestedFields()), piece).tokens == 4


@pytest.mark.parametrize(
    "heard",
    [
        fed(
            TextTranscript("cmpl-x", RequestedFields()),
            {"id": "cmpl-x", "choices": [text_choice(0, None, None)], "usage": USAGE},
        ),
        fed(ChatTranscript("chatcmpl-x", RequestedFields()), {"id": "chatcmpl-x", "choices": [], "usage": USAGE}),
        fed(
            NativeResponseTranscript("resp_x", {}),
            {"id": "resp_x", "status": "completed", "output": [], "usage": {"total_tokens": 500}},
        ),
    ],
    ids=["text", "chat", "response"],
)
def test_what_the_engine_counts_is_counted_where_it_tells_no_ids(heard: Transcript) -> None:
    meter, usage = meter_of(10)
    meter.count_tokens(heard)
    assert usage.tokens == 500


def test_without_any_count_text_is_counted_by_its_length_and_once() -> None:
    heard = fed(TextTranscript("cmpl-x", RequestedFields()), {"id": "cmpl-x", "choices": [text_choice(0, None, None)]})
    meter, usage = meter_of(392)
    meter.count_tokens(heard)
    meter.count_tokens(heard, broken_off=True)
    assert usage.tokens == 100


@pytest.mark.parametrize("body", [HELLO, HELLO | {"stream": True}])
def test_who_leaves_before_the_reply_pays_for_it(
    explorer: RunningExplorer, make_key: MakeKey, double: EngineDouble, body: dict[str, Any]
) -> None:
    key = make_key(Scope.INFERENCE, limits=KeyLimits(tokens_per_minute=5))
    double.silent = True
    with Wire(explorer.url) as wire:
        wire.send(http_request(json.dumps(body).encode(), f"x-api-key: {secret_of(key)}"))
        eventually(lambda: bool(double.chats))
    double.silent = False
    eventually(lambda: explorer.http.post(CHAT, json=HELLO, headers=key).status_code == 429)


def test_a_text_to_be_read_costs_tokens(explorer: RunningExplorer, make_key: MakeKey) -> None:
    key = make_key(Scope.INFERENCE, limits=KeyLimits(tokens_per_minute=50))
    text = {"model": "tiny", "prompt": "x" * 400}
    assert explorer.http.post("/tokenize", json=text, headers=key).status_code == 200
    assert code(explorer.http.post("/tokenize", json=text, headers=key)) == (429, "key_limit_tokens")


def test_so_many_choices_and_no_more(explorer: RunningExplorer) -> None:
    assert code(explorer.http.post(CHAT, json=HELLO | {"n": 129})) == (400, "too_many_choices")
    prompts = {"model": HELLO["model"], "prompt": ["x"] * 513, "n": 2}
    assert code(explorer.http.post("/v1/completions", json=prompts)) == (400, "too_many_choices")
    assert explorer.http.post("/v1/completions", json=prompts | {"n": 1}).json().get("error", {}).get("code") != (
        "too_many_choices"
    )
