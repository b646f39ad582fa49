"""Messages by way of chat completions, against vLLM's own messages: the same prompts, replies, streams and errors."""

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.loop.harness.bare_engine import MODEL
from tests.loop.on_vllm.likeness import Together, chosen
from tuneloop.explorer.dialects.messages import MessageStream, to_chat, to_message
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.http.errors import anthropic_engine_error
from tuneloop.shared.errors import RequestRefused

pytestmark = [pytest.mark.vllm, pytest.mark.contract]

Json = dict[str, Any]

LIGHT = {
    "name": "light",
    "description": "Switches the light.",
    # Strict and of one value: the model has no choice but to end its call.
    "input_schema": {"type": "object", "enum": [{"on": True}]},
    "strict": True,
}
DARK = {"name": "dark", "input_schema": {"enum": [{"deep": [1, {"ä": None}]}]}, "strict": True}
LOOSE = {"name": "weather", "input_schema": {"properties": {"city": {"type": "string"}}}}
TOOLS = {"tools": [LIGHT, DARK]}
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def user(*content: Any) -> Json:
    """A turn of the user: one string, or blocks."""
    alone = len(content) == 1 and isinstance(content[0], str)
    return {"role": "user", "content": content[0] if alone else list(content)}


def assistant(*content: Any) -> Json:
    return user(*content) | {"role": "assistant"}


def system(*content: Any) -> Json:
    return user(*content) | {"role": "system"}


def tool_use(**but: Any) -> Json:
    return {"type": "tool_use", "id": "toolu_1", "name": "light", "input": {"on": True}} | but


def tool_result(content: Any, **but: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content} | but


def change(kind: str, tool: Json) -> Json:
    return {"type": f"tool_{kind}", "tool": tool}


def reference(name: str) -> Json:
    return {"type": "tool_reference", "name": name}


def choose(kind: str, **but: Any) -> Json:
    return {"tool_choice": {"type": kind, **but}}


def ask(*turns: Json, **but: Any) -> Json:
    """A request whose answer does not depend on chance."""
    return {"model": MODEL, "max_tokens": 12, "temperature": 0, "messages": list(turns) or [user("hi")], **but}


CASES = {
    "plain": ask(),
    "an empty string": ask(user("")),
    "empty blocks": ask(user(text("")), user("still there?")),
    "one block": ask(user(text("hello"))),
    "two blocks": ask(user(text("hello "), text("world"))),
    "turns": ask(user("one"), assistant("two"), user("three")),
    "the assistant comes last": ask(user("one"), assistant("two")),
    "two of the user": ask(user("one"), user("two")),
    "an assistant of no blocks": ask(user("one"), assistant(), user("two")),
    "not ASCII": ask(user('größer 😀 \u0000 \n\t"')),
    "a system": ask(system="Be brief."),
    "an empty system": ask(system=""),
    "system blocks": ask(system=[text("Be brief. "), text("Be kind."), text("")]),
    "a billing header": ask(system=[text("x-anthropic-billing-header: cc=1"), text("Be brief.")]),
    "nothing but a billing header": ask(system=[text("x-anthropic-billing-header: cc=1")]),
    "a billing header in a string": ask(system="x-anthropic-billing-header: cc=1"),
    "cache control": ask(user({**text("hello"), "cache_control": {"type": "ephemeral"}})),
    "an inline system": ask(user("one"), system("Be brief."), user("two")),
    "an inline system of blocks": ask(user("one"), system(text("Be "), text("brief.")), user("two")),
    "an inline billing header": ask(user("one"), system("x-anthropic-billing-header: x"), user("two")),
    "both systems": ask(user("one"), system("Be kind."), user("two"), system="Be brief."),
    "thinking before": ask(
        user("one"), assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, text("two")), user("three")
    ),
    "nothing but thinking": ask(user("one"), assistant({"type": "thinking", "thinking": "hm"}), user("two")),
    "hidden thinking": ask(
        user("one"), assistant({"type": "redacted_thinking", "data": "xx"}, text("two")), user("three")
    ),
    "a user that thinks": ask(user({"type": "thinking", "thinking": "hm"}), user(text("one"))),
    "a call and its result": ask(user("on"), assistant(text("ok"), tool_use()), user(tool_result("done"))),
    "a call without words": ask(user("on"), assistant(tool_use()), user(tool_result("done")), **TOOLS),
    "a call without input": ask(user("on"), assistant(tool_use(input=None)), user(tool_result("done"))),
    "a call of odd input": ask(
        user("on"),
        assistant(tool_use(input={"ä": [1, 2.5, None, True, {"b": '\u2028"\\ <&>'}], "n": -7})),
        user(tool_result("done")),
    ),
    "two calls": ask(
        user("on"),
        assistant(tool_use(), tool_use(id="toolu_2")),
        user(tool_result("done"), tool_result("again", tool_use_id="toolu_2"), text("and now?")),
    ),
    "words before a result": ask(user("on"), assistant(tool_use()), user(text("see"), tool_result("done"))),
    "an empty result": ask(user("on"), assistant(tool_use()), user(tool_result(None))),
    "a result that is an error": ask(user("on"), assistant(tool_use()), user(tool_result("no", is_error=True))),
    "a result of blocks": ask(user("on"), assistant(tool_use()), user(tool_result([text("a"), text("b"), {"x": 1}]))),
    "a result of no blocks": ask(user("on"), assistant(tool_use()), user(tool_result([]))),
    "an assistant's result": ask(user("on"), assistant(tool_result([text("a")])), user("go on")),
    "an assistant's empty result": ask(user("on"), assistant(tool_result("")), user("go on")),
    "a user that calls": ask(user(tool_use()), user("hi")),
    "a reference outside": ask(user(text("hi"), {"type": "tool_reference", "tool_name": "light"})),
    "tools": ask(**TOOLS),
    "tools and a system": ask(system="Be brief.", **TOOLS),
    "no tools": ask(tools=[]),
    "no tools to choose from": ask(user("hello"), tools=[], **choose("any")),
    "no tools, but one chosen": ask(user("hello"), **choose("tool", name="light")),
    "a deferred tool": ask(tools=[LIGHT, DARK | {"defer_loading": True}]),
    "a schema without type": ask(tools=[LOOSE]),
    "auto": ask(**TOOLS, **choose("auto", disable_parallel_tool_use=True)),
    "none": ask(**TOOLS, **choose("none")),
    "one call by name": ask(**TOOLS, **choose("tool", name="light"), max_tokens=160),
    "the other by name": ask(**TOOLS, **choose("tool", name="dark"), max_tokens=160),
    "one call of any": ask(**TOOLS, **choose("any", disable_parallel_tool_use=True), max_tokens=160),
    "several calls": ask(tools=[LIGHT], **choose("any"), max_tokens=2 * 67),
    "a loose call": ask(tools=[LOOSE], **choose("any"), max_tokens=40),
    "a call cut off by length": ask(**TOOLS, **choose("any"), max_tokens=56),
    "a call cut off by a string": ask(**TOOLS, **choose("any"), stop_sequences=["on", "deep"], max_tokens=80),
    "a call that a string ends": ask(tools=[LIGHT], **choose("any"), stop_sequences=["</tool"], max_tokens=80),
    "an added tool": ask(user("hi"), system(change("addition", {"type": "tool_definition", "definition": LIGHT}))),
    "a removed tool": ask(user("hi"), system(change("removal", reference("dark"))), **TOOLS),
    "all tools removed": ask(user("hi"), system(change("removal", reference("light"))), tools=[LIGHT]),
    "a tool back again": ask(
        user("hi"),
        system(change("removal", reference("dark")), change("addition", reference("dark"))),
        tools=[LIGHT, DARK | {"defer_loading": True}],
    ),
    "no thinking": ask(thinking={"type": "disabled"}),
    "thinking at will": ask(thinking={"type": "adaptive", "display": "omitted"}),
    "effort": ask(output_config={"effort": "xhigh"}),
    "effort, but no thinking": ask(output_config={"effort": "low"}, thinking={"type": "disabled"}),
    "a schema for the answer": ask(
        output_config={"format": {"type": "json_schema", "schema": {"enum": [{"on": True}]}}}, max_tokens=32
    ),
    "an empty schema": ask(output_config={"format": {"type": "json_schema", "schema": {}}}),
    "a stop string": ask(stop_sequences=["<", "7", "0", "X"], max_tokens=32),
    "sampling": ask(top_p=0.5, top_k=3, stop_sequences=[]),
    "template arguments": ask(chat_template_kwargs={"enable_thinking": False}, cache_salt="salt"),
    "numbers as strings": ask(max_tokens="12", temperature="0", stream="false", system=None),
    "what vLLM does not know": ask(service_tier="auto", container=None, seed=None, metadata={"user_id": "me"}),
}

#: Refused by both, and before a token is sampled.
BAD_REQUESTS = {
    "no messages": {**ask(), "messages": []},
    "messages that are none": {**ask(), "messages": "hi"},
    "an unknown role": ask({"role": "tool", "content": "hi"}),
    "no content": ask({"role": "user"}),
    "an unknown block": ask(user({"type": "document", "source": {}})),
    "a block without type": ask(user({"text": "hi"})),
    "input that is no object": ask(user("on"), assistant(tool_use(input=[1]))),
    "text in a result that is none": ask(user(tool_result([{"type": "text", "text": 5}]))),
    "no max_tokens": {key: value for key, value in ask().items() if key != "max_tokens"},
    "no tokens": ask(max_tokens=0),
    "a fraction of a token": ask(max_tokens=1.5),
    "an unknown model": {**ask(), "model": "nope"},
    "no model": {**ask(), "model": ""},
    "a negative temperature": ask(temperature=-1),
    "a temperature that is none": ask(temperature="hot"),
    "a top_p that is none": ask(top_p=2),
    "an empty stop string": ask(stop_sequences=[""]),
    "too many stop strings": ask(stop_sequences=list("abcde")),
    "an image for a model of text": ask(user({"type": "image", "source": PNG})),
    "an image in a result": ask(
        user("on"), assistant(tool_use()), user(tool_result([{"type": "image", "source": PNG}]))
    ),
    "a tool without schema": ask(tools=[{"name": "light"}]),
    "a tool without name": ask(tools=[{"input_schema": {}}]),
    "a tool chosen that is none of them": ask(**TOOLS, **choose("tool", name="nope")),
    "a tool chosen without name": ask(**TOOLS, **choose("tool")),
    "a choice of unknown type": ask(**TOOLS, **choose("required")),
    "a small budget": ask(thinking={"type": "enabled", "budget_tokens": 10}, max_tokens=20),
    "a budget of all tokens": ask(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1024),
    "unknown thinking": ask(thinking={"type": "deep"}),
    "unknown effort": ask(output_config={"effort": "none"}),
    "a tool changed by the user": ask(user(change("removal", reference("dark"))), **TOOLS),
    "a tool removed by value": ask(
        user("hi"), system(change("removal", {"type": "tool_definition", "definition": LIGHT}))
    ),
    "a tool removed that is not there": ask(user("hi"), system(change("removal", reference("nope"))), **TOOLS),
    "a change of no tool": ask(user("hi"), system({"type": "tool_addition"})),
    "an empty salt": ask(cache_salt=""),
    "template arguments that are none": ask(chat_template_kwargs=[]),
}


def _random_turn(chance: random.Random, role: str) -> Json:
    words = "".join(chance.choice('abc äß😀<>{}"\\\n') for _ in range(chance.randrange(12)))
    blocks = [
        text(words),
        text("x-anthropic-billing-header"),
        {"type": "thinking", "thinking": words, "signature": "s"},
        {"type": "redacted_thinking", "data": words},
        tool_use(input={words: chance.random()}),
        tool_result(chance.choice([None, words, [], [text(words), text("!")]])),
    ]
    content = words if chance.random() < 0.3 else chance.sample(blocks, chance.randrange(len(blocks)))
    return {"role": role, "content": content}


def _random_request(seed: int) -> Json:
    chance = random.Random(seed)
    roles = chance.choices(["user", "assistant", "system"], [4, 3, 1], k=chance.randrange(4))
    turns = [user("begin"), *(_random_turn(chance, role) for role in roles), user("end")]
    optional: list[Json] = [
        {"system": chance.choice(["Be brief.", [text("a"), text(""), text("b")]])},
        {"top_p": 0.9, "top_k": 5},
        {"stop_sequences": [chance.choice("0123456789")]},
        {"output_config": {"effort": chance.choice(["low", "max"])}},
        {"thinking": {"type": chance.choice(["disabled", "adaptive"])}},
        {
            "tools": [LIGHT, DARK][: chance.randrange(1, 3)],
            **choose(chance.choice(["auto", "any", "none"]), disable_parallel_tool_use=chance.random() < 0.5),
        },
    ]
    request = ask(*turns, max_tokens=chance.choice([1, 8, 24]))
    for each in chance.sample(optional, chance.randrange(len(optional))):
        request |= each
    return request


CASES |= {f"random {seed}": _random_request(seed) for seed in range(12)}


#: Sampled with a budget for thinking, which an engine without a reasoning parser refuses late.
BUDGETED = ask(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1025)


def chat_of(request: Json) -> Json:
    """What the engine is asked when the reply is to be recorded."""
    return to_chat(request) | vllm.CAPTURE


def asked(engine: httpx.Client, path: str, body: Json) -> Json:
    reply = engine.post(path, json=body)
    assert reply.status_code == 200, reply.text
    told: Json = reply.json()
    return told


def without_chance(told: Any) -> Any:
    """What is told, but for ids and signatures, which are made anew each time."""
    if isinstance(told, list):
        return [without_chance(each) for each in told]
    if not isinstance(told, dict):
        return told
    return {
        key: f"some {key}" if key in {"id", "signature"} and isinstance(value, str) and value else without_chance(value)
        for key, value in told.items()
    }


def with_inputs(events: list[Json]) -> list[Json]:
    """The events without deltas of an empty input: a block begins with it, and vLLM may tell it again."""
    return [each for each in events if each.get("delta") != {"type": "input_json_delta", "partial_json": "{}"}]


def events_of(stream: bytes) -> Iterator[Json]:
    """The events of a stream; neighbouring deltas, which the engine makes as it gets along, are put together."""
    last: Json | None = None
    for event in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        if last and told["type"] == "content_block_delta" and _alike(last, told):
            portion = next(key for key in told["delta"] if key != "type")
            last["delta"][portion] += told["delta"][portion]
            continue
        if last:
            yield last
        last = told
    if last:
        yield last


def _alike(one: Json, other: Json) -> bool:
    return one.get("index") == other["index"] and one.get("delta", {}).get("type") == other["delta"]["type"]


def streamed_by_vllm(engine: httpx.Client, request: Json) -> list[Json]:
    reply = engine.post("/v1/messages", json=request | {"stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    return list(events_of(reply.content))


def streamed_by_us(engine: httpx.Client, request: Json, **but: Any) -> list[Json]:
    reply = engine.post("/v1/chat/completions", json=chat_of(request | {"stream": True}) | but)
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    stream = MessageStream(msg_id="msg_1")
    told = b""
    for event in reply.content.removesuffix(b"\n\n").split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        told += stream.end() if data == b"[DONE]" else stream.add_chunk(json.loads(data))
    return list(events_of(told))


def _aloud(request: Json) -> Json:
    """Even without tools, vLLM's messages hold back what could become a call, and forget it at the end. See below."""
    return {} if "tools" in to_chat(request) else {"tool_choice": None}


def _questions(name: str, case: Json) -> Iterator[tuple[str, Json]]:
    request = case.get("request_")
    if request is None:
        return
    if name == test_the_prompt_is_the_same.__name__:
        yield from (("/v1/messages/render", request), ("/v1/chat/completions/render", to_chat(request)))
    elif name == test_the_reply_is_the_same.__name__:
        yield from (("/v1/messages", request), ("/v1/chat/completions", chat_of(request)))
    elif name == test_the_stream_is_the_same.__name__:
        streamed = request | {"stream": True}
        yield from (("/v1/messages", streamed), ("/v1/chat/completions", chat_of(streamed) | _aloud(request)))
    elif name == test_what_vllm_refuses_is_refused_alike.__name__:
        yield "/v1/messages", request | {"stream": case["stream"]}
        with suppress(RequestRefused):
            yield "/v1/chat/completions", chat_of(request | {"stream": case["stream"]})


@pytest.fixture(scope="module")
def bare_engine(bare_engine: httpx.Client, request: pytest.FixtureRequest) -> Together:
    return Together(bare_engine, (each for test in chosen(request) for each in _questions(*test)))


@pytest.mark.parametrize("request_", [*CASES.values(), BUDGETED], ids=[*CASES, "a budget"])
def test_the_prompt_is_the_same(bare_engine: httpx.Client, request_: Json) -> None:
    theirs = asked(bare_engine, "/v1/messages/render", request_)
    ours = asked(bare_engine, "/v1/chat/completions/render", to_chat(request_))
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["sampling_params"] == theirs["sampling_params"]


@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_the_reply_is_the_same(bare_engine: httpx.Client, request_: Json) -> None:
    theirs = asked(bare_engine, "/v1/messages", request_)
    ours = to_message(asked(bare_engine, "/v1/chat/completions", chat_of(request_)), msg_id="msg_1")
    assert without_chance(ours) == without_chance(theirs)
    assert ours["id"] == "msg_1"


@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_the_stream_is_the_same(bare_engine: httpx.Client, request_: Json) -> None:
    ours = streamed_by_us(bare_engine, request_, **_aloud(request_))
    theirs = streamed_by_vllm(bare_engine, request_)
    assert without_chance(with_inputs(ours)) == without_chance(with_inputs(theirs))
    assert ours[0]["message"]["id"] == "msg_1"


@pytest.mark.parametrize("content", ["hi", "", "<tool_call>"])
def test_without_tools_a_stream_says_all_that_a_whole_reply_does(bare_engine: httpx.Client, content: str) -> None:
    request = ask(user(content))
    deltas = [event["delta"] for event in streamed_by_us(bare_engine, request) if "delta" in event]
    reply = asked(bare_engine, "/v1/messages", request)
    assert [delta["text"] for delta in deltas if "text" in delta] == [block["text"] for block in reply["content"]]


def test_the_requests_bring_about_what_a_reply_can_be(bare_engine: httpx.Client) -> None:
    """Else the comparisons would say little."""
    names = ("plain", "several calls", "the other by name", "a stop string", "a schema for the answer")
    cut, several, called, stopped, ended = (asked(bare_engine, "/v1/messages", CASES[name]) for name in names)
    reasons = [reply["stop_reason"] for reply in (cut, called, stopped, ended)]
    assert reasons == ["max_tokens", "tool_use", "stop_sequence", "end_turn"]
    assert [block.get("name") for block in several["content"]] == ["light", "light"]
    assert called["content"][-1]["input"] == {"deep": [1, {"ä": None}]}


def refused_by_us(engine: httpx.Client, request: Json) -> tuple[int, str]:
    """The status and type of the error."""
    try:
        chat = chat_of(request)
    except RequestRefused as refused:
        return refused.status, "BadRequestError"
    reply = engine.post("/v1/chat/completions", json=chat)
    return reply.status_code, anthropic_engine_error(reply.json(), status=reply.status_code)["error"]["type"]


@pytest.mark.parametrize("request_", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_vllm_refuses_is_refused_alike(bare_engine: httpx.Client, request_: Json, stream: bool) -> None:
    request = request_ | {"stream": stream}
    reply = bare_engine.post("/v1/messages", json=request)
    told = reply.json()
    # What it sees when it reads a request, vLLM tells in the envelope and the words of chat completions.
    kind = told["error"]["type"] if "type" in told else "BadRequestError"
    assert refused_by_us(bare_engine, request) == (reply.status_code, kind)
    assert 400 <= reply.status_code < 500


def test_what_vllm_refuses_late_ends_the_stream(bare_engine: httpx.Client) -> None:
    ours, theirs = streamed_by_us(bare_engine, BUDGETED), streamed_by_vllm(bare_engine, BUDGETED)
    assert [event["type"] for event in ours] == [event["type"] for event in theirs] == ["error"]
    assert ours[0]["error"]["type"] == "invalid_request_error"
    assert "thinking_token_budget" in ours[0]["error"]["message"]
