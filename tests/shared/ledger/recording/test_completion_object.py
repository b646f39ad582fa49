"""An exchange as OpenAI's object: checked against the types of OpenAI's own client."""

import json
from typing import Any

import msgspec

from tuneloop.shared.ledger.recording.stored_completions import (
    StoredChoice,
    StoredExchange,
    completion,
    tag_of_model,
    tag_of_pair,
    tags_of,
)

CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


def spoken(**but: Any) -> StoredChoice:
    fields: dict[str, Any] = {"choice": 0, "text": "Hello.", "tool_calls": None, "finish_reason": "stop"}
    return StoredChoice(**fields | {"prompt_tokens": 7, "completion_tokens": 3, "temperature": 0.5} | but)


def stored(
    *choices: StoredChoice, metadata: str | None = None, request_metadata: object = None, **request: Any
) -> StoredExchange:
    hello = {"messages": [{"role": "user", "content": "Hi"}], "metadata": request_metadata}
    said = json.dumps(hello | request).encode()
    return StoredExchange(
        msg_id="chatcmpl-x", received_at=99.75, request=said, metadata=metadata, choices=choices or (spoken(),)
    )


def told(kept: StoredExchange) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.json.encode(completion(kept, default_model="served")))
    return found


def test_what_a_request_does_not_say_stands_as_it_was_sampled() -> None:
    assert told(stored()) == {
        "object": "chat.completion",
        "id": "chatcmpl-x",
        "model": "served",
        "created": 99,
        "request_id": "chatcmpl-x",
        "tool_choice": None,
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
        "seed": None,
        "top_p": 1.0,
        "temperature": 0.5,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "system_fingerprint": None,
        "input_user": None,
        "service_tier": None,
        "tools": None,
        "metadata": {},
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello.",
                    "refusal": None,
                    "tool_calls": None,
                    "function_call": None,
                },
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "response_format": None,
    }


def test_what_a_request_says_is_passed_on_as_it_is() -> None:
    said = {
        "model": "m",
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        "seed": 4944116822809979520,
        "top_p": 0.5,
        "temperature": 0,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "service_tier": "flex",
        "response_format": {"type": "json_object"},
    }
    found = told(stored(**said, user="ann"))
    assert {name: found[name] for name in said} == said
    assert found["input_user"] == "ann"
    assert told(stored(top_p=None, temperature=None))["temperature"] == 0.5


def test_nothing_is_found_by_what_only_looks_alike() -> None:
    request = json.dumps({"model": "m", "metadata": {"a": "b", "n": 1}}).encode()
    found = tags_of("acme", request)
    assert found == {tag_of_model("acme", "m"), tag_of_pair("acme", "a", "b"), tag_of_pair("acme", "n", "1")}
    others = {
        tag_of_pair("acme", "ab", ""),
        tag_of_pair("acme", "", "ab"),
        tag_of_pair("other", "a", "b"),
        tag_of_model("other", "m"),
        tag_of_model("acme", "a"),
    }
    assert not found & others
    assert tags_of("acme", request, {"c": "d"}) == {tag_of_model("acme", "m"), tag_of_pair("acme", "c", "d")}
