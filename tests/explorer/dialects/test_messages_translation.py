import json
from typing import Any

import pytest

from tuneloop.explorer.dialects.messages import MessageStream, to_chat, to_message
from tuneloop.explorer.http.errors import anthropic_engine_error, anthropic_error
from tuneloop.explorer.proxy.request import Labels, labels_of
from tuneloop.shared.errors import RequestRefused

pytestmark = pytest.mark.contract

Json = dict[str, Any]

PNG = {"type": "base64", "media_type": "image/png", "data": "xx"}


def messages_request(**but: Any) -> Json:
    return {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}], **but}


def with_message(*content: Any, role: str = "user") -> Json:
    return {"messages": [{"role": role, "content": list(content)}]}


def reply(message: Json, *, finish_reason: str = "stop", stop_reason: str | int | None = None, **but: Any) -> Json:
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "stop_reason": stop_reason}
    return {"id": "chatcmpl-1", "model": "tiny", "choices": [choice], **but}


def call(arguments: str, name: str = "light", number: int = 1) -> Json:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def chunk(delta: Json, **but: Any) -> Json:
    return {
        "id": "chatcmpl-1",
        "model": "tiny",
        "choices": [{"index": 0, "delta": delta, "finish_reason": None, **but}],
    }


def call_chunk(index: int, arguments: str | None = None, **but: Any) -> Json:
    function = {"name": but.pop("name", None), "arguments": arguments}
    return {"index": index, "function": {key: value for key, value in function.items() if value is not None}, **but}


FIRST = chunk({"role": "assistant", "content": ""}) | {"usage": {"prompt_tokens": 5, "completion_tokens": 0}}
USAGE = {"model": "tiny", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}


def stream_events(*chunks: Json) -> list[Json]:
    """The events of a stream."""
    stream = MessageStream(msg_id="msg_1")
    data = b"".join([*map(stream.add_chunk, chunks), stream.end()])
    events = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        name, fields = event.split("\n")
        events.append(json.loads(fields.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def blocks(events: list[Json]) -> list[Json]:
    """The blocks that a client makes of the events; each must begin and end before the next."""
    found: list[Json] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert (event["index"], is_open) == (len(found), False)
            found.append(event["content_block"] | {"json": ""})
            is_open = True
        elif event["type"] == "content_block_delta":
            assert (event["index"], is_open) == (len(found) - 1, True)
            for key, value in event["delta"].items():
                key = "json" if key == "partial_json" else key
                if key != "type":
                    found[-1][key] = found[-1].get(key, "") + value
        elif event["type"] == "content_block_stop":
            assert (event["index"], is_open) == (len(found) - 1, True)
            is_open = False
    assert not is_open
    return [{key: value for key, value in block.items() if value != ""} for block in found]


def test_labels_go_the_way_of_our_own() -> None:
    body = messages_request(
        metadata={"user_id": "me", "task_id": 7, "run_id": "r", "train": False, "priority": 2}, store=False
    )
    chat = to_chat(body)
    assert labels_of(chat) == Labels("7", "r", "me", 2.0, train=False)
    assert chat["store"] is False
    assert body["metadata"]["user_id"] == "me"


def test_who_the_user_is_may_also_be_said_in_our_words() -> None:
    assert to_chat(messages_request(metadata={"user_id": "theirs", "user": "ours"}))["metadata"]["user"] == "ours"
    assert "metadata" not in to_chat(messages_request())
    assert "store" not in to_chat(messages_request())


def test_a_stream_is_asked_to_count_its_tokens() -> None:
    chat = to_chat(messages_request(stream=True))
    assert (chat["stream"], chat["stream_options"]["include_usage"]) == (True, True)
    assert "stream" not in to_chat(messages_request(stream=False))


def test_a_conversation_keeps_its_reasoning_calls_and_ids() -> None:
    turns = [
        {"role": "user", "content": "on"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "h", "signature": "s"},
                {"type": "thinking", "thinking": "m"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "toolu_1", "name": "light", "input": {"on": True}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"},
                {"type": "text", "text": "!"},
            ],
        },
    ]
    function = {"name": "light", "arguments": '{"on":true}'}
    assert to_chat(messages_request(messages=turns))["messages"] == [
        {"role": "user", "content": "on"},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": "ok",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "done"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "text", "text": "!"}]},
    ]


def test_only_what_is_asked_for_is_asked() -> None:
    assert to_chat(messages_request(temperature=None, tools=None, tool_choice={"type": "any"})) == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 8,
    }


@pytest.mark.parametrize(
    ("thinking", "budget", "effort"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, 1024, "low"),
        ({"type": "adaptive"}, None, "low"),
        ({"type": "disabled"}, None, "none"),
    ],
)
def test_thinking_has_a_budget_and_an_effort(thinking: Json, budget: int | None, effort: str) -> None:
    chat = to_chat(messages_request(thinking=thinking, output_config={"effort": "low"}, max_tokens=2000))
    assert (chat.get("thinking_token_budget"), chat["reasoning_effort"]) == (budget, effort)


def test_images_are_carried_over() -> None:
    url = {"type": "url", "url": "https://example.com/a.png"}
    chat = to_chat(
        messages_request(
            **with_message(
                {"type": "text", "text": "see"}, {"type": "image", "source": PNG}, {"type": "image", "source": url}
            )
        )
    )
    assert [part.get("image_url") for part in chat["messages"][0]["content"]] == [
        None,
        {"url": "data:image/png;base64,xx"},
        {"url": "https://example.com/a.png"},
    ]


def test_a_result_shows_its_images_as_the_user_and_names_the_tools_it_found() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "image", "source": PNG},
        {"type": "tool_reference", "tool_name": "light"},
        {"type": "image", "source": {"type": "url"}},
    ]
    chat = to_chat(messages_request(**with_message({"type": "tool_result", "tool_use_id": "t", "content": content})))
    assert chat["messages"] == [
        {"role": "tool", "tool_call_id": "t", "content": "a"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}]},
        {"role": "tool", "tool_call_id": "t", "content": [{"type": "tool_reference", "name": "light"}]},
    ]


def test_the_request_is_left_as_it_was() -> None:
    body = messages_request(tools=[{"name": "light", "input_schema": {}}])
    assert to_chat(body)["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert body["tools"][0]["input_schema"] == {}


@pytest.mark.parametrize(
    ("but", "param", "word"),
    [
        ({"max_tokens": None}, "max_tokens", "integer"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0.text",
            "string",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [5]}]}]}, None, "dictionary"),
        (
            with_message({"type": "tool_result", "content": [{"type": "image", "source": "x"}]}),
            "tool_result.content.source",
            "object",
        ),
        (with_message({"type": "tool_addition"}, role="system"), "messages.0.content.0", "tool is required"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "name is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None, "less than max_tokens"),
        ({"metadata": []}, "metadata", "dictionary"),
    ],
)
def test_a_refusal_names_the_place(but: Json, param: str | None, word: str) -> None:
    with pytest.raises(RequestRefused, match=word) as refused:
        to_chat(messages_request(**but))
    assert refused.value.status == 400
    assert param is None or refused.value.param == param


def test_a_whole_reply_has_its_blocks_in_order() -> None:
    message = {
        "role": "assistant",
        "reasoning": "hm",
        "content": "ok",
        "tool_calls": [call('{"on":true}'), call("{}", number=2)],
    }
    found = to_message(reply(message, finish_reason="tool_calls"), msg_id="msg_1")
    thinking, *rest = found["content"]
    assert (thinking["type"], thinking["thinking"], len(thinking["signature"])) == ("thinking", "hm", 32)
    assert rest == [
        {"type": "text", "text": "ok"},
        {"type": "tool_use", "id": "call_1", "name": "light", "input": {"on": True}},
        {"type": "tool_use", "id": "call_2", "name": "light", "input": {}},
    ]
    assert found["stop_reason"] == "tool_use"
    assert found["id"] == "msg_1"


@pytest.mark.parametrize(
    ("finish_reason", "matched", "calls", "stop_reason", "stop_sequence"),
    [
        ("stop", None, [], "end_turn", None),
        ("stop", 257, [], "end_turn", None),
        ("stop", "###", [], "stop_sequence", "###"),
        ("length", "###", [], "max_tokens", None),
        ("stop", None, [call("{}")], "tool_use", None),
        ("stop", "###", [call("{}")], "tool_use", None),
        ("stop", "###", [call("{}"), call("{}", number=2)], "tool_use", None),
        ("tool_calls", None, [call("{}")], "tool_use", None),
        ("length", None, [call("{}")], "max_tokens", None),
        ("abort", None, [], None, None),
    ],
)
def test_why_a_reply_ended(
    finish_reason: str, matched: str | int | None, calls: list[Json], stop_reason: str | None, stop_sequence: str | None
) -> None:
    message = {"content": "x", "tool_calls": calls}
    found = to_message(reply(message, finish_reason=finish_reason, stop_reason=matched), msg_id="msg_1")
    assert (found.get("stop_reason"), found.get("stop_sequence")) == (stop_reason, stop_sequence)
    pieces = [call_chunk(index, "{}", id=each["id"], name="light") for index, each in enumerate(calls)]
    last = chunk({"tool_calls": pieces}, finish_reason=finish_reason, stop_reason=matched)
    delta = stream_events(FIRST, last, USAGE)[-2]["delta"]
    assert delta == {"stop_reason": stop_reason, "stop_sequence": stop_sequence}


@pytest.mark.parametrize("arguments", ['{"on": tr', "", "[1]", "7"])
def test_a_call_that_cannot_be_run_is_shown_and_not_run(arguments: str) -> None:
    found = to_message(reply({"tool_calls": [call(arguments)]}, stop_reason="###"), msg_id="msg_1")
    assert found["content"] == [{"type": "text", "text": arguments}]
    assert found["stop_sequence"] == "###"


def test_nothing_said_is_one_empty_block() -> None:
    assert to_message(reply({"content": None}), msg_id="msg_1")["content"] == [{"type": "text", "text": ""}]


def test_input_tokens_are_those_that_no_cache_had() -> None:
    usage = {
        "prompt_tokens": 50,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 32, "created_cache_tokens": 8},
    }
    expected = {
        "input_tokens": 10,
        "output_tokens": 3,
        "cache_read_input_tokens": 32,
        "cache_creation_input_tokens": 8,
    }
    assert to_message(reply({"content": "x"}, usage=usage), msg_id="msg_1")["usage"] == expected
    assert stream_events(FIRST, USAGE | {"usage": usage})[-2]["usage"] == expected
    assert to_message(reply({"content": "x"}), msg_id="msg_1")["usage"] == {"input_tokens": 0, "output_tokens": 0}


def test_a_stream_begins_and_ends_like_a_message() -> None:
    events = stream_events(FIRST, chunk({"content": "a"}), chunk({"content": "b"}, finish_reason="length"), USAGE)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"] == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "tiny",
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 0},
    }
    assert events[-2]["usage"] == {"input_tokens": 5, "output_tokens": 7}


def test_a_stream_of_nothing_has_no_block() -> None:
    events = stream_events(FIRST, chunk({}), chunk({"content": ""}, finish_reason="stop"), USAGE)
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]


def test_thinking_is_signed_when_it_ends() -> None:
    events = stream_events(FIRST, chunk({"reasoning": "h"}), chunk({"reasoning": "m"}), chunk({"content": "ok"}), USAGE)
    thinking, text = blocks(events)
    assert (thinking["thinking"], len(thinking["signature"])) == ("hm", 32)
    assert text == {"type": "text", "text": "ok"}


def test_thinking_that_never_ends_is_signed_too() -> None:
    (thinking,) = blocks(stream_events(FIRST, chunk({"reasoning": "hm"}, finish_reason="length"), USAGE))
    assert len(thinking["signature"]) == 32


def test_the_first_chunk_may_speak_already() -> None:
    assert blocks(stream_events(chunk({"role": "assistant", "content": "a"}), USAGE)) == [{"type": "text", "text": "a"}]


def test_text_around_several_calls() -> None:
    events = stream_events(
        FIRST,
        chunk({"content": "see: "}),
        chunk({"tool_calls": [call_chunk(0, id="call_1", name="light")]}),
        chunk({"tool_calls": [call_chunk(0, '{"on":')]}),
        chunk({"content": "mean"}),
        chunk({"content": "while"}),
        chunk({"tool_calls": [call_chunk(0, "true}"), call_chunk(1, "{}", id="call_2", name="dark")]}),
        chunk({"content": "bye"}, finish_reason="tool_calls"),
        USAGE,
    )
    assert blocks(events) == [
        {"type": "text", "text": "see: "},
        {"type": "tool_use", "id": "call_1", "name": "light", "input": {}, "json": '{"on":true}'},
        {"type": "text", "text": "meanwhile"},
        {"type": "tool_use", "id": "call_2", "name": "dark", "input": {}, "json": "{}"},
        {"type": "text", "text": "bye"},
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_call_that_a_stop_string_cut_short_must_not_run() -> None:
    pieces = [call_chunk(0, "{}", id="call_1", name="light"), call_chunk(1, '{"on', id="call_2", name="light")]
    events = stream_events(
        FIRST, chunk({"tool_calls": pieces}), chunk({}, finish_reason="stop", stop_reason="###"), USAGE
    )
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "###"}


def test_an_error_ends_the_stream() -> None:
    error = {"error": {"message": "the engine is dead", "type": "InternalServerError", "code": 500}}
    events = stream_events(FIRST, chunk({"content": "a"}), error, chunk({"content": "b"}), USAGE)
    assert [event["type"] for event in events][-2:] == ["content_block_delta", "error"]
    assert events[-1]["error"] == {"type": "api_error", "message": "the engine is dead"}


@pytest.mark.parametrize(
    ("code", "kind"),
    [(429, "rate_limit_error"), (503, "overloaded_error"), ("full", "api_error"), (400, "invalid_request_error")],
)
def test_an_error_in_a_stream_is_of_the_type_of_its_status(code: int | str, kind: str) -> None:
    assert stream_events({"error": {"message": "no", "code": code}}) == [
        {"type": "error", "error": {"type": kind, "message": "no"}}
    ]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (529, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    assert anthropic_error("no", status=status) == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert anthropic_error("no", status=status, kind="api_error")["error"]["type"] == "api_error"


def test_the_engines_errors_are_told_as_its_messages_would_tell_them() -> None:
    missing = {"error": {"message": "no such model", "type": "NotFoundError", "param": None, "code": 404}}
    assert anthropic_engine_error(missing, status=404) == {
        "type": "error",
        "error": {"type": "NotFoundError", "message": "no such model"},
    }
    bad = {"error": {"message": "bad", "type": "Bad Request", "param": None, "code": 400}}
    assert anthropic_engine_error(bad, status=400)["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize("answer", [{"error": "Unauthorized"}, {"detail": "x"}, {"error": {"message": None}}])
def test_an_engine_that_errs_without_words_still_has_an_error(answer: Json) -> None:
    expected = {"type": "authentication_error", "message": "the engine answered 401"}
    assert anthropic_engine_error(answer, status=401)["error"] == expected
