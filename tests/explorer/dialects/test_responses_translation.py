"""Responses as chat completions and back, without an engine; tests/loop holds them against vLLM's own."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tuneloop.explorer.dialects.responses_reply import ResponseStream, to_response
from tuneloop.explorer.dialects.responses_request import (
    LOGPROBS,
    continued_messages,
    left_out,
    normalize,
    to_chat,
)
from tuneloop.explorer.proxy.request import Labels, labels_of
from tuneloop.shared.errors import RequestRefused

pytestmark = pytest.mark.contract

Json = dict[str, Any]

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
USAGE = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}

RICH: Json = {
    "model": "m",
    "instructions": "Be short.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "easy"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ],
    "tools": [ADD],
    "tool_choice": {"type": "function", "name": "add"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"},
    "include": [LOGPROBS],
    "top_logprobs": 2,
    "max_output_tokens": 5,
    "metadata": {"task_id": "t", "run_id": "3", "train": "false", "priority": "2"},
    "user": "u",
    "safety_identifier": "s",
    "store": False,
    "stream": True,
}


def reply(finish_reason: str = "stop", **message: Any) -> Json:
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
    return {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": USAGE}


def tool_call(index: int, arguments: str) -> Json:
    function = {"name": "add", "arguments": arguments}
    return {"id": f"call{index}", "type": "function", "index": index, "function": function}


def answered(body: Json, answer: Json, **options: Any) -> Json:
    return to_response(body, answer, response_id="resp_1", created_at=1, **options)


def chunk(finish_reason: str | None = None, **delta: Any) -> Json:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {"model": "m", "choices": [choice], "usage": {"prompt_tokens": 10}}


LAST = {"model": "m", "choices": [], "usage": USAGE}


def streamed(*chunks: Json, body: Json | None = None, context: int | None = None) -> list[Json]:
    stream = ResponseStream(body or {"input": "Hi."}, response_id="resp_1", created_at=1, context_length=context)
    text = b"".join(map(stream.add_chunk, chunks)) + stream.end()
    answer = [json.loads(block.split("\ndata: ")[1]) for block in text.decode().split("\n\n") if block]
    assert [event["sequence_number"] for event in answer] == list(range(len(answer)))
    assert [block.split("\n")[0] for block in text.decode().split("\n\n") if block] == [
        f"event: {event['type']}" for event in answer
    ]
    for event in answer:
        EVENT.validate_python(event)
    return answer


def test_a_request_becomes_a_chat_completion():
    before = copy.deepcopy(RICH)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True}
    assert to_chat(RICH) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
            {"role": "assistant", "reasoning": "easy", "content": "Wait.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 5,
        "metadata": {"task_id": "t", "run_id": "3", "train": "false", "priority": "2"},
        "user": "u",
        "safety_identifier": "s",
        "store": False,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert before == RICH


def test_the_explorer_reads_its_labels_in_the_chat_completion():
    assert labels_of(to_chat(RICH)) == Labels("t", "3", "s", 2.0, train=False)


def test_nothing_is_sent_that_was_not_asked_for():
    assert to_chat({"input": "Hi.", "temperature": None, "tools": [], "stream": False, "unknown": 1}) == {
        "messages": [{"role": "user", "content": "Hi."}],
        "stream": False,
    }


PATCH = {
    **{"type": "custom", "name": "apply_patch", "description": "Edits files."},
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
SPACE = {"type": "namespace", "name": "agents", "description": "d", "tools": [ADD, {"type": "custom", "name": "say"}]}
AGENTS = {"input": "Hi.", "tools": [ADD, PATCH, SPACE, {"type": "web_search", "external_web_access": True}]}


def called(name: str, *arguments: str) -> list[Json]:
    """The tool calls of a chat completion's chunks: the first has the name, each a part of the arguments."""
    first = {"index": 0, "id": "c", "type": "function", "function": {"name": name, "arguments": arguments[0]}}
    return [first, *({"index": 0, "function": {"arguments": each}} for each in arguments[1:])]


def test_tools_of_any_kind_that_a_model_can_call_are_functions():
    chat = to_chat(AGENTS)
    functions = {each["function"]["name"]: each["function"] for each in chat["tools"]}
    assert list(functions) == ["add", "apply_patch", "agents__add", "agents__say"]
    assert functions["agents__add"] == {"name": "agents__add", "parameters": {"type": "object"}, "strict": True}
    patch = functions["apply_patch"]
    assert (patch["parameters"]["required"], patch["parameters"]["properties"]["input"]["type"]) == (
        ["input"],
        "string",
    )
    assert patch["description"].startswith("Edits files.")
    assert "*** Begin Patch" in patch["description"]  # nothing enforces the grammar: the model has to know it
    assert left_out(AGENTS) == ("tools.web_search", "tools.apply_patch.format")


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "say"}, "agents__say"),
        ({"type": "function", "name": "agents__add"}, "agents__add"),
    ],
)
def test_a_tool_of_any_kind_can_be_chosen(choice: Json, chosen: str):
    chat = to_chat(AGENTS | {"tool_choice": choice})
    assert chat["tool_choice"] == {"type": "function", "function": {"name": chosen}}


def test_allowed_tools_are_those_that_the_model_gets():
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]}
    chat = to_chat(AGENTS | {"tool_choice": choice})
    assert ([each["function"]["name"] for each in chat["tools"]], chat["tool_choice"]) == (["apply_patch"], "required")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tools": [{"type": "web_search"}]}, "web_search: such tools run at the provider"),
        ({"tools": [{"type": "mcp"}, {"type": "image_generation"}]}, "mcp and image_generation: such tools"),
        ({"tools": [ADD, {"type": "custom"}]}, r"tools\[1\].name must be a string"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, r"tools\[0\].tools must be a list"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools.*tools.*name"),
        ({"tools": [ADD], "tool_choice": {"type": "custom", "name": "none"}}, "tool_choice must name one of tools"),
    ],
)
def test_tools_that_nobody_can_call_are_refused_with_a_sentence(fields: Json, why: str):
    with pytest.raises(RequestRefused, match=why):
        to_chat({"input": "Hi.", **fields})


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("apply_patch", ['{"inp', 'ut": "*** \\u00fc', '\\n"}'], {"type": "custom_tool_call", "input": "*** ü\n"}),
        ("apply_patch", ["*** no JSON"], {"type": "custom_tool_call", "input": "*** no JSON"}),
        ("agents__say", ['{"input": "x"}'], {"type": "custom_tool_call", "input": "x", "namespace": "agents"}),
        ("agents__add", ["{}"], {"type": "function_call", "arguments": "{}", "namespace": "agents"}),
        ("add", ["{}"], {"type": "function_call", "arguments": "{}", "namespace": None}),
        ("unknown", ["{}"], {"type": "function_call", "arguments": "{}", "name": "unknown"}),
    ],
)
def test_a_call_comes_back_as_the_client_knows_its_tool(name: str, arguments: list[str], item: Json):
    pieces = called(name, *arguments)
    whole = copy.deepcopy(pieces[0])
    whole["function"]["arguments"] = "".join(arguments)
    answer = reply("tool_calls", tool_calls=[whole])
    [said] = to_response(AGENTS, answer, response_id="resp_1", created_at=1)["output"]
    assert item.items() <= said.items()
    assert said["name"] == name.removeprefix("agents__")
    events = streamed(*(chunk(tool_calls=[each]) for each in pieces), chunk("tool_calls"), LAST, body=AGENTS)
    assert events[-1]["response"]["output"] == [said]
    if said["type"] == "custom_tool_call":
        kinds = ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        assert [(each["type"], each.get("delta", each.get("input"))) for each in events if each["type"] in kinds] == [
            (kind, item["input"]) for kind in kinds
        ]
    # And it is heard as it was said.
    output = {"type": f"{said['type']}_output", "call_id": "c", "output": "ok"}
    [before, _] = to_chat({"input": [said, output]})["messages"]
    function = before["tool_calls"][0]["function"]
    assert function["name"] == name
    if item.get("input") != "*** no JSON":
        assert json.loads(function["arguments"]) == json.loads("".join(arguments))


def test_calls_of_custom_tools_are_put_as_vllm_puts_them():
    received = [
        {"type": "custom_tool_call", "call_id": "c", "name": "shell", "input": 'echo "ü"'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ü"},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": '{"input": "echo \\"ü\\""}'}}
    assert to_chat({"input": received})["messages"] == [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ü"},
    ]


def test_an_image_keeps_its_address():
    parts = [{"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "original"}]
    [message] = to_chat({"input": [{"role": "user", "content": parts}]})["messages"]
    image = {"url": "data:image/png;base64,AA", "detail": "auto"}
    assert message["content"] == [{"type": "image_url", "image_url": image}]


def test_an_unfinished_message_is_gone_on_with():
    body = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "He"}]}
    assert "continue_final_message" not in to_chat({"input": [body]})
    chat = to_chat({"input": [{**body, "status": "incomplete"}]})
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)


def test_text_after_a_call_opens_a_turn_only_if_the_turn_has_text():
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    body = {"role": "assistant", "content": "Hm."}
    roles = [list(message) for message in to_chat({"input": [call, body, body, call, call]})["messages"]]
    assert roles == [["role", "tool_calls", "content"], ["role", "content", "tool_calls"]]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "message", "function", "user", "auto"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name", "x"]), inner),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, each in inner for found in ((*path, key), *places(each, (*path, key)))]


@given(place=st.sampled_from(places({key: RICH[key] for key in RICH if key != "metadata"})), value=JSON_VALUES)
def test_a_wrong_value_is_refused_and_breaks_nothing(place: tuple[Any, ...], value: Any):
    body = copy.deepcopy(RICH)
    holder = body
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    refusal = None
    try:
        body = normalize(body)
        json.dumps(to_chat(body))
        answered(body, reply(content="2"))
    except RequestRefused as error:
        refusal = error
    assert refusal is None or (refusal.status == 400 and refusal.param)


@pytest.mark.parametrize(
    ("refused", "param"),
    [
        ({"input": "Hi.", "max_output_tokens": "many"}, "max_output_tokens"),
        ({"input": "Hi.", "background": "maybe"}, "background"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": "Hi.", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "Hi.", "tool_choice": "required"}, "tool_choice"),
        ({"input": "Hi.", "tool_choice": {"type": "mcp"}}, "tool_choice"),
    ],
)
def test_a_refusal_names_the_field(refused: Json, param: str):
    with pytest.raises(RequestRefused) as refusal:
        to_chat(normalize(refused))
    assert refusal.value.param == param


def test_a_conversation_is_what_was_said():
    body = {
        "instructions": "Be short.",
        "input": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a"}],
    }
    response = answered(body, reply(content="b", reasoning="hm", tool_calls=[tool_call(0, "{}")]))
    text = continued_messages(body, response, [{"role": "user", "content": "before"}])
    assert text == [
        {"role": "user", "content": "before"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert to_chat({"input": "c", "instructions": "Be long."}, text)["messages"] == [
        {"role": "system", "content": "Be long."},
        *text,
        {"role": "user", "content": "c"},
    ]


def test_a_response_holds_all_that_was_said():
    response = answered(RICH, reply(content="2", reasoning="easy", tool_calls=[tool_call(0, "{}"), tool_call(1, "[]")]))
    parsed = Response.model_validate(response)
    assert (parsed.id, parsed.created_at, parsed.status, parsed.output_text) == ("resp_1", 1, "completed", "2")
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["call_id"] for item in response["output"][2:]] == ["call0", "call1"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert response["metadata"] == RICH["metadata"]
    assert response["tools"][0] == ADD | dict.fromkeys(set(response["tools"][0]) - set(ADD))


def test_hidden_reasoning_stays_hidden():
    logprobs = {"content": [{"token": "2", "bytes": [50], "logprob": -1.0, "top_logprobs": []}]}
    answer = reply(content="2", reasoning="easy")
    answer["choices"][0]["logprobs"] = logprobs
    hidden = {**RICH, "include_reasoning": False}
    assert [part["logprobs"] for part in answered(RICH, answer)["output"][1]["content"]] == [logprobs["content"]]
    [message] = answered(hidden, answer)["output"]
    assert message["content"][0]["logprobs"] is None
    pieces = chunk(reasoning="easy"), chunk("stop", content="2")
    pieces[1]["choices"][0]["logprobs"] = logprobs
    events = streamed(*pieces, LAST, body=hidden)
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message"]
    assert [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"] == [[]]


def test_usage_tells_of_caches_and_reasoning():
    answer = reply(content="2")
    details = {"cached_tokens": 8, "created_cache_tokens": 2}
    answer["usage"] = {**USAGE, "prompt_tokens_details": details, "completion_tokens_details": {"reasoning_tokens": 3}}
    usage = answered(RICH, answer)["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (10, 4, 14)
    assert usage["input_tokens_details"]["cached_tokens"] == 8
    assert usage["input_tokens_details"]["cache_write_tokens"] == 2
    assert usage["output_tokens_details"]["reasoning_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "context", "limit"), [(5, None, 5), (None, None, None), (None, 100, 90), (5, 100, 5), (95, 100, 90)]
)
def test_a_response_says_how_long_it_could_get(fields: int | None, context: int | None, limit: int | None):
    body = {"input": "Hi.", "max_output_tokens": fields}
    assert answered(body, reply(content="2"), context_length=context)["max_output_tokens"] == limit
    created = streamed(chunk("stop", content="2"), LAST, body=body, context=context)[0]
    assert created["response"]["max_output_tokens"] == limit


@pytest.mark.parametrize(
    ("finish_reason", "status"),
    [("stop", "completed"), ("length", "incomplete"), ("tool_calls", "completed")],
)
def test_a_reply_that_was_cut_off_is_incomplete(finish_reason: str, status: str):
    body = {"input": "Hi.", "max_output_tokens": 4}
    response = answered(body, reply(finish_reason, tool_calls=[tool_call(0, "{}")]))
    assert response["status"] == status
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)


def test_a_stream_opens_and_closes_one_item_after_the_other():
    events = streamed(
        chunk(role="assistant", content=""),
        chunk(reasoning="ea"),
        chunk(reasoning="sy", content="2"),
        chunk(content="!"),
        chunk(tool_calls=[tool_call(0, ""), {"index": 0, "function": {"arguments": "{}"}}]),
        chunk(tool_calls=[tool_call(1, "[")]),
        chunk("tool_calls", tool_calls=[{"index": 1, "function": {"arguments": "]"}}]),
        LAST,
    )
    item = ["response.output_item.added", "response.content_part.added"]
    reasoned = ["response.reasoning_text.delta"] * 2 + ["response.reasoning_text.done"]
    body = ["response.output_text.delta"] * 2 + ["response.output_text.done"]
    called = "response.function_call_arguments"
    end = ["response.content_part.done", "response.output_item.done"]
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress"),
        *(*item, *reasoned, *end),
        *(*item, *body, *end),
        *("response.output_item.added", f"{called}.delta", f"{called}.done", "response.output_item.done"),
        *("response.output_item.added", *[f"{called}.delta"] * 2, f"{called}.done", "response.output_item.done"),
        "response.completed",
    ]
    reasoning, message, *calls = events[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "easy"}]
    assert message["content"][0]["text"] == "2!"
    assert [(call["call_id"], call["arguments"]) for call in calls] == [("call0", "{}"), ("call1", "[]")]


DELTAS = st.lists(
    st.one_of(
        st.builds(lambda text: {"content": text}, st.text("ab", max_size=2)),
        st.builds(lambda text: {"reasoning": text}, st.text("ab", max_size=2)),
        st.builds(lambda index, text: {"tool_calls": [tool_call(index, text)]}, st.integers(0, 2), st.text("{}")),
        st.just({}),
    ),
    max_size=12,
)


@given(deltas=DELTAS)
def test_the_deltas_of_a_stream_add_up_to_its_items(deltas: list[Json]):
    *events, completed = streamed(*(chunk(**delta) for delta in deltas), chunk("stop"), LAST)
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done]
    assert [event["output_index"] for event in done] == list(range(len(done)))
    assert [event["item"] for event in done] == completed["response"]["output"]
    for place, item in enumerate(completed["response"]["output"]):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert text == "".join(event.get("delta", "") for event in events if event.get("output_index") == place)


ERROR = {"error": {"message": "out of memory", "type": "InternalServerError", "param": None, "code": 500}}


@pytest.mark.parametrize("before", [[], [chunk(content="He")]], ids=["at once", "after words"])
def test_an_error_ends_a_stream_as_clients_know_it(before: list[Json]):
    *_, error, failed = streamed(*before, ERROR, chunk("stop", content="llo"), LAST)
    assert (error["type"], error["message"], error["code"]) == ("error", "out of memory", "500")
    assert failed["type"] == "response.failed"
    response = Response.model_validate(failed["response"])
    assert (response.status, response.error and response.error.message) == ("failed", "out of memory")


@pytest.mark.parametrize("chunks", [[], [chunk(content="He")], [chunk("stop", content="He")]])
def test_a_stream_that_breaks_off_is_not_called_completed(chunks: list[Json]):
    broken = [{**each, "usage": None} for each in chunks]
    assert [event["type"] for event in streamed(*broken)][-2:] == ["error", "response.failed"]
