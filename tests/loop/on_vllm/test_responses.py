"""Responses made of chat completions, next to vLLM's own: equal field by field, whole and streamed."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.loop.harness.bare_engine import MODEL
from tests.loop.on_vllm.likeness import Together, chosen
from tuneloop.explorer.dialects.responses_reply import ResponseStream, to_response
from tuneloop.explorer.dialects.responses_request import continued_messages, to_chat
from tuneloop.explorer.engines import vllm
from tuneloop.shared.errors import RequestRefused

Json = dict[str, Any]

pytestmark = [pytest.mark.vllm, pytest.mark.contract]

RESPONSE_ID = "resp_0123456789abcdef"

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK = {
    "type": "function",
    "name": "clock",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    "strict": True,
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}

CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'}
CALLED = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SUMMED_UP = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}


def user(*parts: str) -> Json:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": part} for part in parts]}


INPUTS: dict[str, Json] = {
    "words": {"input": "Hi."},
    "no words": {"input": ""},
    "signs": {"input": "Grüezi, 世界 \N{GRINNING FACE} <tool_call>"},
    "instructed": {"input": "Hi.", "instructions": "Be short."},
    "a message": {"input": [{"role": "user", "content": "Hi."}]},
    "parts": {"input": [user("Hi.", "Who are you?")]},
    "a developer": {"input": [{"role": "developer", "content": "Be kind."}, user("Hi.")]},
    "two systems": {"instructions": "Be short.", "input": [{"role": "system", "content": "Be kind."}, user("Hi.")]},
    "a conversation": {"input": [user("Hi."), SAID, user("Go on.")]},
    "plain assistant": {"input": [user("Hi."), {"role": "assistant", "content": "Hello."}, user("Go on.")]},
    "an item of ours": {
        "input": [
            user("Hi."),
            {**SAID, "id": "msg_1", "status": "completed", "content": [{**SAID["content"][0], "annotations": []}]},
            user("Go on."),
        ]
    },
    "a call": {"input": [user("Weather?"), CALL, CALLED], "tools": [WEATHER]},
    "calls": {"input": [user("Weather?"), CALL, {**CALL, "call_id": "c2"}, CALLED, {**CALLED, "call_id": "c2"}]},
    "a said call": {"input": [user("Weather?"), SAID, CALL, CALLED], "tools": [WEATHER, CLOCK]},
    "a thought call": {"input": [user("Weather?"), THOUGHT, CALL, CALLED], "tools": [WEATHER]},
    "a thought": {"input": [user("Weather?"), THOUGHT, SAID, user("Go on.")]},
    "thoughts": {"input": [user("Weather?"), SUMMED_UP, THOUGHT, SAID, SAID, THOUGHT, CALL, user("Go on.")]},
    "a namespace": {"input": [user("Weather?"), {**CALL, "namespace": "home"}, CALLED]},
    "output in parts": {
        "input": [user("Weather?"), CALL, {**CALLED, "output": [{"type": "input_text", "text": "sunny"}]}]
    },
    "unfinished": {"input": [user("Hi."), {**SAID, "status": "incomplete"}]},
    "a custom call": {
        "input": [
            user("Weather?"),
            {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": 'echo "ü"'},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "ü"},
        ]
    },
    "previous thoughts alone": {"input": [THOUGHT, user("Hi.")]},
}

OPTIONS: dict[str, Json] = {
    "long": {"max_output_tokens": 24},
    "short": {"max_output_tokens": 1},
    "stop": {"stop": ["a", "<"], "max_output_tokens": 24},
    "stop kept": {"stop": "Z", "include_stop_str_in_output": True, "max_output_tokens": 24},
    "at once over": {"logit_bias": {"258": 100}},
    "soon over": {"stop_token_ids": [241, 134, 27], "skip_special_tokens": False},
    "never over": {"ignore_eos": True},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
    "logprobs alone": {"include": ["message.output_text.logprobs"]},
    "most logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 2},
    "logprobs not asked for": {"top_logprobs": 3, "include": ["reasoning.encrypted_content"]},
    "labels": {"metadata": {"task_id": "t", "run_id": "1"}, "user": "u", "safety_identifier": "s", "store": False},
    "echo": {"max_tool_calls": 3, "service_tier": "flex", "prompt_cache_key": "k", "parallel_tool_calls": False},
    "truncation": {"truncation": "auto"},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1},
    "nucleus": {"top_p": 0.5, "top_k": 3, "min_p": 0.1},
    "nearly greedy": {"temperature": 0.001, "top_k": 1, "top_p": 0.9},
    "warm": {"temperature": 0.7, "top_k": 1, "top_p": 0.9},
    "default temperature": {"temperature": None, "top_k": 1},
    "effort": {"reasoning": {"effort": "low", "summary": "auto"}},
    "no effort": {"reasoning": {}},
    "no reasoning shown": {"include_reasoning": False},
    "text": {"text": {"format": {"type": "text"}, "verbosity": "low"}},
    "json": {"text": {"format": {"type": "json_object"}}},
    "schema": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}},
    "choices": {"structured_outputs": {"choice": ["yes", "no"]}},
    "template": {"chat_template_kwargs": {"enable_thinking": False}},
    "salt": {"cache_salt": "s", "session_id": "s", "priority": 0},
    "tools": {"tools": [WEATHER, CLOCK]},
    "tools, one at a time": {"tools": [WEATHER, CLOCK], "parallel_tool_calls": False},
    "tools, none": {"tools": [WEATHER], "tool_choice": "none"},
    "tools, required": {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_output_tokens": 80},
    "tools, named": {
        "tools": [WEATHER, CLOCK],
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 40,
    },
    "tools, named, one at a time": {
        "tools": [WEATHER, CLOCK],
        "tool_choice": {"type": "function", "name": "clock"},
        "parallel_tool_calls": False,
        "max_output_tokens": 40,
    },
    "tools, cut off": {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 12},
    "unknown fields": {"verbosity": "x", "stream_options": {"include_obfuscation": False}, "n": 2, "logprobs": True},
}


def _cases() -> Iterator[Any]:
    """Every input plainly, every option plainly, and some inputs with some option."""
    common: Json = {"model": MODEL, "temperature": 0, "max_output_tokens": 6}
    for name, said in INPUTS.items():
        yield pytest.param({**common, **said}, id=name)
    for name, options in OPTIONS.items():
        yield pytest.param({**common, "input": "Hi.", **options}, id=name)
    mixed = zip(list(INPUTS.items())[::2], list(OPTIONS.items())[8:], strict=False)
    for (name, said), (option, options) in mixed:
        yield pytest.param({**common, **said, **options}, id=f"{name}, {option}")


def _questions(name: str, case: Json) -> Iterator[tuple[str, Json]]:
    """What is not streamed: vLLM loses log-probabilities of pieces that come at once, which more do of many streams."""
    if name == test_a_request_is_answered_as_by_vllm.__name__:
        body = case["body"]
        yield from (("/v1/responses/render", body), ("/v1/responses", body))
        yield from (("/v1/chat/completions/render", to_chat(body)), ("/v1/chat/completions", _captured(body)))
    elif name == test_what_vllm_refuses_is_refused_with_the_same_status.__name__:
        body = {**LEAST, **case["wrong"]}
        yield "/v1/responses", body
        with suppress(RequestRefused):
            yield "/v1/chat/completions", to_chat(body)


@pytest.fixture(scope="module")
def bare_engine(bare_engine: httpx.Client, request: pytest.FixtureRequest) -> Together:
    return Together(bare_engine, (each for test in chosen(request) for each in _questions(*test)))


@pytest.fixture(scope="module")
def context(bare_engine: httpx.Client) -> int:
    return int(bare_engine.get("/v1/models").json()["data"][0]["max_model_len"])


def _asked(engine: httpx.Client, path: str, body: Json) -> Json:
    reply = engine.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _whole(engine: httpx.Client, body: Json, context: int, previous: Sequence[Json] = ()) -> Json:
    """The response that we make, as the explorer would: from a chat completion that it captures."""
    chat = to_chat(body, previous)
    reply = _asked(engine, "/v1/chat/completions", _captured(body, previous))
    return to_response(
        body,
        _without_capture(chat, reply),
        response_id=RESPONSE_ID,
        created_at=int(time.time()),
        context_length=context,
    )


def _captured(body: Json, previous: Sequence[Json] = ()) -> Json:
    return to_chat(body, previous) | vllm.CAPTURE


def _streamed(engine: httpx.Client, body: Json, context: int) -> bytes:
    body = {**body, "stream": True}
    chat = to_chat(body)
    stream = ResponseStream(body, response_id=RESPONSE_ID, created_at=int(time.time()), context_length=context)
    said = b""
    with engine.stream("POST", "/v1/chat/completions", json=chat | vllm.CAPTURE) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                said += stream.end()
            elif data:
                said += stream.add_chunk(_without_capture(chat, json.loads(data)))
    return said


def _without_capture(chat: Json, told: Json) -> Json:
    """What a client of the chat completion would get, without what only the explorer asked for."""
    told.pop("prompt_token_ids", None)
    for choice in told["choices"]:
        choice.pop("token_ids", None)
        if not chat.get("logprobs"):
            choice["logprobs"] = None
    return told


def _events(said: bytes) -> list[Json]:
    told = []
    for block in said.decode().split("\n\n"):
        if block:
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            told.append(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def _joined(events: list[Json]) -> list[Json]:
    """The events with neighbouring deltas as one: how many tokens come at once is up to the engine's scheduler."""
    joined: list[Json] = []
    for event in ({**event} for event in events):
        del event["sequence_number"]
        if joined and "delta" in event and joined[-1]["type"] == event["type"]:
            joined[-1]["delta"] += event["delta"]
            joined[-1] |= {"logprobs": joined[-1]["logprobs"] + event["logprobs"]} if "logprobs" in event else {}
        else:
            joined.append(event)
    return joined


_ID = re.compile(r"(resp|msg|rs|fc)_[0-9a-f]{16}|chatcmpl-tool-[0-9a-f]{16}")


def _comparable(told: Any, key: str = "") -> Any:
    """Without ids, times, cached tokens, and tokens that are parts of a character, which no stream shows alone."""
    if key == "logprobs" and told:
        told = [each for each in told if each["token"] and not each["token"].startswith("<|")]
    if isinstance(told, dict):
        return {key: _comparable(value, key) for key, value in told.items()}
    if isinstance(told, list):
        return [_comparable(value) for value in told]
    if key in {"id", "item_id", "call_id"}:
        assert _ID.fullmatch(told), told
        return told[:-16]
    if key in {"created_at", "cached_tokens", "cache_write_tokens"}:
        assert isinstance(told, int)
        return 0
    return told


def _nearly(told: Any) -> Any:
    """The same, but for the last digits of numbers."""
    if isinstance(told, dict):
        return {key: _nearly(value) for key, value in told.items()}
    if isinstance(told, list):
        return [_nearly(value) for value in told]
    return pytest.approx(told, abs=1e-4) if isinstance(told, float) else told


#: By how vLLM cuts its own stream it may lose the arguments of a call that has none.
_TRIES = 5


@pytest.mark.parametrize("body", [*_cases()])
def test_a_request_is_answered_as_by_vllm(bare_engine: httpx.Client, body: Json, context: int):
    rendered = _asked(bare_engine, "/v1/responses/render", body)
    ours = _asked(bare_engine, "/v1/chat/completions/render", to_chat(body))
    assert ours["token_ids"] == rendered["token_ids"]

    theirs = _asked(bare_engine, "/v1/responses", body)
    response = _whole(bare_engine, body, context)
    Response.model_validate(response)
    assert _comparable(response) == _nearly(_comparable(theirs))

    for _ in range(_TRIES):
        streamed = bare_engine.post("/v1/responses", json={**body, "stream": True})
        expected = _comparable(_joined(_events(streamed.content)))
        told = _events(_streamed(bare_engine, body, context))
        for event in told:
            EVENT.validate_python(event)
        if _comparable(_joined(told)) == _nearly(expected):
            return
    assert _comparable(_joined(told)) == _nearly(expected)


def test_a_conversation_goes_on_from_the_previous_response(bare_engine: httpx.Client, context: int):
    common: Json = {"model": MODEL, "temperature": 0, "max_output_tokens": 6, "tools": [WEATHER]}
    turns: list[Json] = [
        {"input": [{"role": "system", "content": "Be kind."}, user("Hi.")], "instructions": "Be short."},
        {"input": "Go on.", "instructions": "Be long."},
        {"input": "Weather?", "tool_choice": "required", "max_output_tokens": 80},
        {"input": [CALL, CALLED, user("So?")]},
    ]
    previous: list[Json] = []
    theirs: Json = {"id": None}
    for turn in turns:
        body = {**common, **turn, "previous_response_id": theirs["id"]}
        theirs = _asked(bare_engine, "/v1/responses", body)
        ours = _whole(bare_engine, body, context, previous)
        assert ours["previous_response_id"] == theirs["previous_response_id"]
        assert ours["usage"]["input_tokens"] == theirs["usage"]["input_tokens"]
        assert _comparable(ours["output"]) == _comparable(theirs["output"])
        previous = continued_messages(body, theirs, previous)
    asked = [message["content"] for message in previous if message["role"] == "user"]
    assert asked == [[{"type": "text", "text": "Hi."}], "Go on.", "Weather?", [{"type": "text", "text": "So?"}]]


REFUSED: dict[str, Json] = {
    "no input": {"input": None},
    "an empty input": {"input": []},
    "a number": {"input": 3},
    "no object": {"input": ["Hi."]},
    "no role": {"input": [{"content": "Hi."}]},
    "an unknown role": {"input": [{"role": "king", "content": "Hi."}]},
    "no content": {"input": [{"role": "user"}]},
    "an unknown part": {"input": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]},
    "a file": {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
    "words of the assistant": {"input": [{"role": "user", "content": SAID["content"]}]},
    "a nameless call": {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]},
    "no output": {"input": [{"type": "function_call_output", "call_id": "c", "output": None}]},
    "reasoning without summary": {"input": [{"type": "reasoning", "content": []}]},
    "encrypted reasoning": {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
    "a reference": {"input": [{"type": "item_reference", "id": "x"}]},
    "instructions of no type": {"instructions": ["Be short."]},
    "no tokens": {"max_output_tokens": 0},
    "too many tokens": {"max_output_tokens": 100_000},
    "a cold temperature": {"temperature": -1},
    "a hot temperature": {"temperature": 3},
    "a nameless tool": {"tools": [{"type": "function", "parameters": {}}]},
    "a tool of a chat": {"tools": [{"type": "function", "function": {"name": "weather"}}]},
    "a choice without tools": {"tool_choice": "required"},
    "an unknown choice": {"tools": [WEATHER], "tool_choice": "some"},
    "an unknown function": {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "clock"}},
    "an unknown format": {"text": {"format": {"type": "xml"}}},
    "a format without schema": {"text": {"format": {"type": "json_schema", "name": "a"}}},
    "two formats": {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"choice": ["a"]}},
    "an unknown effort": {"reasoning": {"effort": "huge"}},
    "an unknown inclusion": {"include": ["everything"]},
    "too many logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 21},
    "a prompt": {"prompt": {"id": "p"}},
    "an unknown truncation": {"truncation": "some"},
    "an unknown tier": {"service_tier": "gold"},
    "labels of no type": {"metadata": []},
    "an unknown model": {"model": "unknown"},
    "a long input": {"input": "a" * 5000},
}


LEAST: Json = {"model": MODEL, "input": "Hi.", "max_output_tokens": 1}


@pytest.mark.parametrize("wrong", REFUSED.values(), ids=REFUSED)
def test_what_vllm_refuses_is_refused_with_the_same_status(bare_engine: httpx.Client, wrong: Json):
    body = {**LEAST, **wrong}
    try:
        status = bare_engine.post("/v1/chat/completions", json=to_chat(body)).status_code
    except RequestRefused as error:
        status = error.status
    assert status == bare_engine.post("/v1/responses", json=body).status_code
    assert status in {400, 404}
