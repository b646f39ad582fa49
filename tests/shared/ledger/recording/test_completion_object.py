"""An exchange as OpenAI's object: checked against the types of OpenAI's own client."""

import json
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionStoreMessage

from tuneloop.shared.ledger.recording.stored_completions import (
    StoredChoice,
    StoredExchange,
    completion,
    messages,
    metadata_as_text,
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


def test_the_choices_are_those_of_openai() -> None:
    calling = spoken(choice=1, text="", tool_calls=json.dumps([CALL]).encode(), finish_reason="tool_calls")
    both = spoken(choice=2, text="Let me see.", tool_calls=json.dumps([CALL]).encode())
    found = told(stored(spoken(), calling, both, spoken(choice=3, text="", finish_reason="length")))
    parsed = ChatCompletion.model_validate(found)
    assert [each.message.content for each in parsed.choices] == ["Hello.", None, "Let me see.", ""]
    assert [bool(each.message.tool_calls) for each in parsed.choices] == [False, True, True, False]
    assert found["choices"][1]["message"]["tool_calls"] == [CALL]
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 12, "total_tokens": 19}


def test_messages_have_ids_and_keep_all_that_was_said() -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    said = [
        {"role": "system", "content": "Be kind.", "id": "mine"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "call-1"},
    ]
    found = messages(stored(messages=said))
    assert [each["id"] for each in found] == [f"chatcmpl-x-{number}" for number in range(4)]
    assert [each["role"] for each in found] == ["system", "user", "assistant", "tool"]
    assert (found[1]["content"], found[1]["content_parts"], found[1]["name"]) == (None, parts, "ann")
    assert (found[0]["content"], found[0]["content_parts"], found[0]["name"]) == ("Be kind.", None, None)
    assert found[2]["tool_calls"] == [CALL]
    assert found[3]["tool_call_id"] == "call-1"
    assert ChatCompletionStoreMessage.model_validate(found[2]).id == "chatcmpl-x-2"


@pytest.mark.parametrize("request_", [b"", b"no json", b"[]", b"null", b'{"messages": 3}', b'{"messages": [1]}'])
def test_a_request_that_is_none_has_no_messages(request_: bytes) -> None:
    kept = StoredExchange(msg_id="x", received_at=0, request=request_, metadata=None, choices=())
    assert messages(kept) == []
    assert told(kept)["model"] == "served"
    assert tags_of("acme", request_) == set()


def test_metadata_are_strings_and_changed_ones_are_shown_instead() -> None:
    said = {"task_id": "t", "run_id": 3, "train": False, "none": None, "list": [1, "ä"]}
    assert metadata_as_text(said) == {"task_id": "t", "run_id": "3", "train": "false", "list": '[1,"ä"]'}
    assert told(stored(request_metadata=said))["metadata"] == metadata_as_text(said)
    assert told(stored(request_metadata=said, metadata='{"a": "b"}'))["metadata"] == {"a": "b"}
    assert told(stored(request_metadata=said, metadata="{}"))["metadata"] == {}
    assert metadata_as_text("none") == {}


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
