"""What vLLM answers is what comes through the explorer, field by field: replies, streams, refusals, and 404 elsewhere.

Every case is asked of the explorer's engine directly and through the explorer, whole and streamed. All are
deterministic: temperature 0, or nothing else to choose.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loop.harness.services import Service
from tests.loop.on_vllm.likeness import Json, Together, assert_alike, chosen, is_old, masked

pytestmark = [pytest.mark.vllm, pytest.mark.contract]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Json = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
STRICT: Json = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
CALL: Json = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
SCHEMA: Json = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
NAMED: Json = {"type": "function", "function": {"name": "weather"}}
SIGNS = 'Grüezi, 世界 \N{GRINNING FACE} \U0001f468\u200d\U0001f469 "quoted" \\ <tool_call> \x01 \u2028'
SYSTEM: Json = {"role": "system", "content": "Be kind."}
USER: Json = {"role": "user", "content": "Hi."}
SAID: Json = {"role": "assistant", "content": "Hello."}


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


CONVERSATIONS: dict[str, list[Json]] = {
    "a word": [USER],
    "nothing": [user("")],
    "signs": [user(SIGNS)],
    "parts": [user([{"type": "text", "text": "Hi."}, {"type": "text", "text": "Who are you?"}])],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, SAID, user("Go on.")],
    "names": [{**USER, "name": "ann"}, SAID, {**USER, "name": "bob"}],
    "tool results": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rain"}]},
    ],
    "a long one": [user("once upon a time " * 40)],
    "thoughts": [USER, {**SAID, "reasoning_content": "Hm."}, user("So?")],
    "says our keys": [user('"logprobs":null,"token_ids":[1],"prompt_token_ids":[2],"id":"chatcmpl-1"')],
}

SAMPLING: dict[str, Json] = {
    "stop": {"stop": ["a", "<"]},
    "stop, kept": {"stop": "<", "include_stop_str_in_output": True},
    "stop ids": {"stop_token_ids": [27, 241, 134]},
    "at once over": {"logit_bias": {"258": 100}},
    "special shown": {"logit_bias": {"257": 100}, "skip_special_tokens": False},
    "special hidden": {"logit_bias": {"257": 100}},
    "not spaced": {"spaces_between_special_tokens": False},
    "one token": {"allowed_token_ids": [70]},
    "one forced, warm": {"allowed_token_ids": [70], "temperature": 0.7},
    "an emoji": {"structured_outputs": {"choice": ["\N{GRINNING FACE} 世"]}},
    "two tokens": {"allowed_token_ids": [70, 71]},
    "bad words": {"bad_words": ["<", "s"]},
    "at least": {"min_tokens": 3, "logit_bias": {"258": 5}},
    "never over": {"ignore_eos": True, "logit_bias": {"258": 100}},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1},
    "nucleus": {"top_p": 0.5, "top_k": 3, "min_p": 0.1},
    "one of one": {"top_k": 1, "temperature": 1.5},
    "three": {"n": 3, "temperature": 1, "top_k": 1},
    "three, warm": {"n": 3, "allowed_token_ids": [70], "temperature": 0.5},
    "choices": {"structured_outputs": {"choice": ["yes", "no"]}},
    "regex": {"structured_outputs": {"regex": "[0-9]{3}"}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "ab" "c"'}},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "any json": {"response_format": {"type": "json_object"}, "structured_outputs": None},
    "text": {"response_format": {"type": "text"}},
    "ids": {"return_token_ids": True},
    "no ids": {"return_token_ids": False},
    "one token a chunk": {"stream_interval": 1},
    "three tokens a chunk": {"stream_interval": 3},
    "ids of tokens": {"return_tokens_as_token_ids": True},
    "priority": {"priority": 0, "cache_salt": "s", "session_id": "s"},
    "truncated": {"truncate_prompt_tokens": 4},
    "beams": {"use_beam_search": True, "n": 2, "length_penalty": 1.1},
    "labels": {"metadata": {"task_id": "t", "run_id": "1"}, "user": "ann"},
    "labels of no type": {"metadata": []},
    "not stored": {"store": False},
    "unknown": {"foo": {"bar": [1, None]}, "verbosity": "low", "service_tier": "auto"},
    "nulls": {"top_p": None, "stop": None, "logit_bias": None, "stream_options": None, "tools": None},
    "repetition": {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}},
    "long": {"max_tokens": 40},
}

OF_CHAT: dict[str, Json] = {
    "logprobs": {"logprobs": True},
    "no logprobs": {"logprobs": False},
    "no number of choices": {"n": None, "logprobs": None},
    "top logprobs": {"logprobs": True, "top_logprobs": 3},
    "no top logprobs": {"top_logprobs": 0},
    "logprobs of ids": {"logprobs": True, "logprob_token_ids": [70, 71]},
    "logprobs and ids": {"logprobs": True, "top_logprobs": 1, "return_token_ids": True},
    "prompt logprobs": {"prompt_logprobs": 1},
    "prompt logprobs and ids": {"prompt_logprobs": 0, "return_token_ids": True},
    "prompt text": {"return_prompt_text": True},
    "echo": {"echo": True},
    "echo, continued": {
        "echo": True,
        "messages": [USER, SAID],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continued": {"messages": [USER, SAID], "add_generation_prompt": False, "continue_final_message": True},
    "no generation prompt": {"add_generation_prompt": False},
    "template": {"chat_template_kwargs": {"enable_thinking": False}},
    "documents": {"documents": [{"title": "a", "text": "b"}]},
    "effort": {"reasoning_effort": "low"},
    "no reasoning": {"include_reasoning": False},
    "newer limit": {"max_completion_tokens": 3, "max_tokens": None},
    "both limits": {"max_completion_tokens": 3, "max_tokens": 5},
    "tools": {"tools": [WEATHER, CLOCK]},
    "tools, none": {"tools": [WEATHER], "tool_choice": "none"},
    "tools, auto": {"tools": [WEATHER], "tool_choice": "auto", "logprobs": True},
    "tools, required": {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_tokens": 90},
    "tools, required, logprobs": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 90, "logprobs": True},
    "tools, required, ids": {"tools": [WEATHER], "tool_choice": "required", "return_token_ids": True},
    "tools, named": {"tools": [WEATHER, CLOCK], "tool_choice": NAMED, "max_tokens": 60},
    "tools, one at a time": {"tools": [WEATHER], "parallel_tool_calls": False},
    "tools, required, one": {
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 90,
    },
    "strict tools": {"tools": [STRICT]},
    "strict tools, called": {"tools": [STRICT], "logit_bias": {"260": 100}, "max_tokens": 60},
    "a call": {
        "tools": [WEATHER],
        "structured_outputs": {
            "choice": ['<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>']
        },
        "tool_choice": "none",
        "max_tokens": 80,
    },
}

OF_TEXT: dict[str, Json] = {
    "logprobs": {"logprobs": 0},
    "top logprobs": {"logprobs": 3},
    "logprobs of ids": {"logprobs": 1, "logprob_token_ids": [70, 71]},
    "logprobs and ids": {"logprobs": 1, "return_token_ids": True},
    "prompt logprobs": {"prompt_logprobs": 1},
    "prompt logprobs and ids": {"prompt_logprobs": 0, "return_token_ids": True},
    "echo": {"echo": True},
    "echo, logprobs": {"echo": True, "logprobs": 1},
    "echo, ids": {"echo": True, "return_token_ids": True},
    "echo, logprobs and ids": {"echo": True, "logprobs": 0, "return_token_ids": True},
    "echo, prompt logprobs": {"echo": True, "prompt_logprobs": 0},
    "echo alone": {"echo": True, "max_tokens": 0},
    "echo alone, logprobs": {"echo": True, "max_tokens": 0, "logprobs": 2},
    "echo alone, ids": {"echo": True, "max_tokens": 0, "logprobs": 0, "return_token_ids": True},
    "echo of ids": {"echo": True, "prompt": [70, 71, 72]},
    "echo of several": {"echo": True, "prompt": ["a b", "c"], "logprobs": 1},
    "no limit": {"max_tokens": None},
    "no special": {"add_special_tokens": False},
    "suffix": {"suffix": None},
}

PROMPTS: dict[str, Any] = {
    "a word": "Hello",
    "signs": SIGNS,
    "ids": [70, 71, 72, 257],
    "several": ["one", "two", "three"],
    "several ids": [[70, 71], [72]],
    "one of several": ["one"],
    "a long one": "once upon a time " * 40,
    "says our keys": '"logprobs":null,"token_ids":[1]',
}

SHORT: Json = {"temperature": 0, "max_tokens": 6}


def _cases() -> Iterator[Any]:
    for name, messages in CONVERSATIONS.items():
        yield pytest.param(CHAT, {**SHORT, "messages": messages}, id=f"chat: {name}")
    for name, options in (SAMPLING | OF_CHAT).items():
        yield pytest.param(CHAT, {**SHORT, "messages": [USER], **options}, id=f"chat: {name}")
    for name, prompt in PROMPTS.items():
        yield pytest.param(TEXT, {**SHORT, "prompt": prompt}, id=f"text: {name}")
    for name, options in (SAMPLING | OF_TEXT).items():
        yield pytest.param(TEXT, {**SHORT, "prompt": "Hello", **options}, id=f"text: {name}")


STREAMED: tuple[Json, ...] = (
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
)


def _as_stream(body: Json) -> Json:
    return {**body, "stream": True, **STREAMED[len(str(body)) % len(STREAMED)]}


@pytest.fixture(scope="module")
def questions(request: pytest.FixtureRequest, served: str) -> list[tuple[str, Json]]:
    """What the tests will ask both."""
    found = []
    for name, case in chosen(request):
        if name == test_a_refusal_is_vllms_own.__name__:
            found.append((case["path"], _with_least(case["path"], served, case["wrong"])))
        elif name in {test_a_reply_is_vllms_own.__name__, test_other_routes_answer_as_vllms.__name__}:
            body = {"model": served, **case["body"]}
            streams = name == test_a_reply_is_vllms_own.__name__
            found += [(case["path"], each) for each in (body, *([_as_stream(body)] if streams else []))]
    return found


@pytest.fixture(scope="module")
def ours(explorer: Service, questions: list[tuple[str, Json]]) -> Iterator[Together]:
    with httpx.Client(base_url=explorer.url, timeout=60) as client:
        yield Together(client, questions)


@pytest.fixture(scope="module")
def engine_http(engine_http: httpx.Client, questions: list[tuple[str, Json]]) -> Together:
    return Together(engine_http, questions)


@pytest.fixture(scope="module")
def served(explorer: Service) -> str:
    return explorer.settings.served_model_name


@pytest.fixture(scope="module")
def old(engine_http: httpx.Client) -> bool:
    """Such a vLLM fails on some requests that later ones answer or refuse, and quotes in refusals what it was asked."""
    return is_old(engine_http)


@pytest.mark.parametrize(("path", "body"), [*_cases()])
def test_a_reply_is_vllms_own(
    engine_http: httpx.Client, ours: httpx.Client, served: str, path: str, body: Json, old: bool
) -> None:
    body = {"model": served, **body}
    status = assert_alike(engine_http, ours, path, body).status
    assert status == 200 or (old and status == 500)
    streamed = assert_alike(engine_http, ours, path, _as_stream(body))
    # What vLLM does not stream, beams and log-probabilities of the prompt, it refuses.
    assert streamed.events[-1:] == ["[DONE]"] or streamed.status == 400


_words = st.text(st.characters(codec="utf-8"), max_size=12)
_mixed = {
    "temperature": st.sampled_from([0, 0.0, "0"]),
    "stop": st.one_of(_words.filter(bool), st.lists(_words.filter(bool), max_size=2)),
    "n": st.sampled_from([1, 2]),
    "max_tokens": st.integers(0, 8),
    "min_tokens": st.integers(0, 9),
    "ignore_eos": st.booleans(),
    "logit_bias": st.dictionaries(st.sampled_from(["70", "258", "999"]), st.sampled_from([-100, 5.5, 100, 101])),
    "allowed_token_ids": st.lists(st.sampled_from([70, 71, 258, 999]), max_size=3),
    "bad_words": st.lists(_words, max_size=2),
    "top_p": st.sampled_from([0, 0.5, 1]),
    "top_k": st.sampled_from([-2, -1, 0, 1, 4]),
    "min_p": st.sampled_from([0, 0.2, 2]),
    "repetition_penalty": st.sampled_from([0, 1, 1.3]),
    "presence_penalty": st.sampled_from([-3, 0, 0.4]),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "return_token_ids": st.sampled_from([True, False, None]),
    "prompt_logprobs": st.sampled_from([-2, 0, 1, None]),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.sampled_from([*STREAMED, None]),
    "structured_outputs": st.sampled_from([{"choice": ["a", "b"]}, {"regex": "[ab]+"}, {"json": SCHEMA}, {}]),
    "user": _words,
    "metadata": st.dictionaries(st.sampled_from(["a", "run_id"]), _words.filter(lambda said: "\0" not in said)),
    "store": st.booleans(),
    "anything": st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | _words, st.lists, max_leaves=3),
}
_chats = st.fixed_dictionaries(
    {"messages": st.sampled_from([*CONVERSATIONS.values()]) | _words.map(lambda said: [user(said)])},
    optional=_mixed
    | {
        "logprobs": st.sampled_from([True, False, None]),
        "top_logprobs": st.sampled_from([None, 0, 2, -5]),
        "tools": st.sampled_from([[WEATHER], [STRICT, CLOCK], [], None]),
        "tool_choice": st.sampled_from(["none", "auto", "required", NAMED, "some", None]),
        "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "xml"}]),
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
    },
)
_texts = st.fixed_dictionaries(
    {"prompt": st.sampled_from([*PROMPTS.values()]) | _words | st.lists(st.integers(0, 300), max_size=5)},
    optional=_mixed | {"logprobs": st.sampled_from([None, 0, 2, -5, 99]), "suffix": st.sampled_from([None, "end"])},
)


@settings(max_examples=120, derandomize=True, database=None)
@given(asked=st.one_of(_chats.map(lambda body: (CHAT, body)), _texts.map(lambda body: (TEXT, body))))
def test_whatever_is_asked_is_answered_as_by_vllm(
    engine_http: httpx.Client, ours: httpx.Client, served: str, asked: tuple[str, Json], old: bool
) -> None:
    path, body = asked
    if old:  # what is for us alone no engine hears of, nor quotes it
        body = {name: value for name, value in body.items() if name not in {"store", "metadata"}}
    assert_alike(engine_http, ours, path, {"model": served, "temperature": 0, "max_tokens": 5, **body})


IMAGE: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}

REFUSED: dict[str, tuple[str, Json]] = {
    "no messages": (CHAT, {"messages": None}),
    "messages of no type": (CHAT, {"messages": "Hi."}),
    "an empty conversation": (CHAT, {"messages": []}),
    "no role": (CHAT, {"messages": [{"content": "Hi."}]}),
    "an unknown part": (CHAT, {"messages": [user([{"type": "smell"}])]}),
    "an image": (CHAT, {"messages": [user([IMAGE])]}),
    "a conversation too long": (CHAT, {"messages": [user("a" * 2000)]}),
    "a reply too long": (CHAT, {"max_tokens": 5000}),
    "no tokens": (CHAT, {"max_tokens": 0}),
    "no tokens, newer": (CHAT, {"max_completion_tokens": 0}),
    "tokens below none": (CHAT, {"max_tokens": -1}),
    "tokens of no type": (CHAT, {"max_tokens": "many"}),
    "more at least than at most": (CHAT, {"min_tokens": 9}),
    "greedy choices": (CHAT, {"n": 2}),
    "too hot": (CHAT, {"temperature": 3}),
    "no nucleus": (CHAT, {"top_p": 0}),
    "too large a nucleus": (CHAT, {"top_p": 2}),
    "top_k below none": (CHAT, {"top_k": -2}),
    "too large a min_p": (CHAT, {"min_p": 2}),
    "too large a penalty": (CHAT, {"presence_penalty": 3}),
    "no repetition": (CHAT, {"repetition_penalty": 0}),
    "bias of no type": (CHAT, {"logit_bias": [1]}),
    "bias of no token": (CHAT, {"logit_bias": {"9999": 1}}),
    "no token allowed": (CHAT, {"allowed_token_ids": []}),
    "an unknown token allowed": (CHAT, {"allowed_token_ids": [9999]}),
    "stop of no type": (CHAT, {"stop": 3}),
    "top logprobs without logprobs": (CHAT, {"top_logprobs": 2}),
    "all logprobs without logprobs": (CHAT, {"top_logprobs": -1}),
    "logprobs of ids without logprobs": (CHAT, {"logprob_token_ids": [70]}),
    "too many logprobs": (CHAT, {"logprobs": True, "top_logprobs": 99}),
    "top logprobs of no type": (CHAT, {"logprobs": True, "top_logprobs": "two"}),
    "prompt logprobs in a stream": (CHAT, {"stream": True, "prompt_logprobs": 1}),
    "stream options without stream": (CHAT, {"stream_options": {"include_usage": True}}),
    "an unknown format": (CHAT, {"response_format": {"type": "xml"}}),
    "a format without schema": (CHAT, {"response_format": {"type": "json_schema"}}),
    "a schema of no type": (CHAT, {"structured_outputs": {"json": {"type": "wish"}}}),
    "a broken regex": (CHAT, {"structured_outputs": {"regex": "["}}),
    "two structures": (CHAT, {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    "no tools": (CHAT, {"tools": []}),
    "a nameless tool": (CHAT, {"tools": [{"type": "function", "function": {}}]}),
    "a choice without tools": (CHAT, {"tool_choice": "required"}),
    "an unknown choice": (CHAT, {"tools": [WEATHER], "tool_choice": "some"}),
    "an unknown function": (CHAT, {"tools": [CLOCK], "tool_choice": NAMED}),
    "both continued and begun": (CHAT, {"continue_final_message": True}),
    "a priority beyond all": (CHAT, {"priority": 2**70}),
    "no prompt": (TEXT, {"prompt": None}),
    "an empty prompt": (TEXT, {"prompt": ""}),
    "no prompts": (TEXT, {"prompt": []}),
    "a prompt of no type": (TEXT, {"prompt": {"a": 1}}),
    "ids that are none": (TEXT, {"prompt": [-1]}),
    "an unknown id": (TEXT, {"prompt": [9999]}),
    "a prompt too long": (TEXT, {"prompt": "a" * 2000}),
    "no tokens of text": (TEXT, {"max_tokens": 0}),
    "no choices": (TEXT, {"n": 0}),
    "a suffix": (TEXT, {"suffix": "end"}),
    "logprobs below none": (TEXT, {"logprobs": -3}),
    "logprobs of no type": (TEXT, {"logprobs": "one"}),
    "too many logprobs of text": (TEXT, {"logprobs": 99}),
    "logprobs of ids without logprobs, text": (TEXT, {"logprob_token_ids": [70]}),
    "echo of beams": (TEXT, {"echo": True, "use_beam_search": True, "logprobs": 1, "n": 2}),
}

#: What the explorer itself must understand before an engine is asked.
OURS: dict[str, tuple[str, Json, str]] = {
    "stream": (CHAT, {"stream": "yes please"}, "stream"),
    "logprobs": (CHAT, {"logprobs": "many"}, "logprobs"),
    "return_token_ids": (CHAT, {"return_token_ids": "many"}, "return_token_ids"),
    "store": (CHAT, {"store": "never"}, "store"),
    "echo of no type": (TEXT, {"echo": "loud"}, "echo"),
    "a model of no type": (CHAT, {"model": 3}, "model"),
    "no choices": (CHAT, {"n": -1}, "n"),
    "choices of no type": (CHAT, {"n": "many"}, "n"),
    "a cold temperature": (CHAT, {"temperature": -1}, "temperature"),
    "a temperature of no type": (TEXT, {"temperature": "warm"}, "temperature"),
}


def _with_least(path: str, served: str, asked: Json) -> Json:
    return {"model": served, **SHORT, **({"messages": [USER]} if path == CHAT else {"prompt": "Hello"}), **asked}


#: What the context has no room for.
LONG = {name: REFUSED.pop(name) for name in ("a conversation too long", "a reply too long", "a prompt too long")}


@pytest.mark.parametrize(("path", "wrong"), LONG.values(), ids=LONG)
def test_a_refusal_for_length_is_vllms_own_with_openais_code(
    engine_http: httpx.Client, ours: httpx.Client, served: str, path: str, wrong: Json
):
    theirs, told = (http.post(path, json=_with_least(path, served, wrong)).json() for http in (engine_http, ours))
    assert told["error"] == theirs["error"] | {"code": "context_length_exceeded"}


def test_a_conversation_goes_on_after_a_call_that_was_cut_off(explorer: Service, served: str):
    """vLLM itself refuses each later turn."""
    cut = CALL | {"function": CALL["function"] | {"arguments": '{"place": "Par'}}
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [cut]}]
    turns += [{"role": "tool", "tool_call_id": "call_1", "content": "sunny"}, user("Well?")]
    with httpx.Client(base_url=explorer.url, timeout=60) as client:
        reply = client.post(CHAT, json={"model": served, "messages": turns, **SHORT})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-tuneloop-ignored"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(("path", "wrong"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_vllms_own(
    engine_http: httpx.Client, ours: httpx.Client, served: str, path: str, wrong: Json, old: bool
):
    told = assert_alike(engine_http, ours, path, _with_least(path, served, wrong))
    assert 400 <= told.status < 500 + old
    assert set(told.body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_unknown_model_is_vllms_404_with_the_way_to_those_there_are(
    engine_http: httpx.Client, ours: httpx.Client, served: str, path: str
):
    theirs, told = (
        each.post(path, json=_with_least(path, served, {"model": "unknown"})) for each in (engine_http, ours)
    )
    assert told.status_code == theirs.status_code == 404
    error = told.json()["error"]
    assert error["message"] == "The model `unknown` does not exist. GET /v1/models lists those that do."
    assert error | {"message": ""} == theirs.json()["error"] | {"message": ""}


@pytest.mark.parametrize(("path", "wrong", "param"), OURS.values(), ids=OURS)
def test_what_we_refuse_ourselves_has_the_same_envelope(
    ours: httpx.Client, served: str, path: str, wrong: Json, param: str
):
    reply = ours.post(path, json=_with_least(path, served, wrong))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": NaN}', b"\xff", b'"a"', b'{"a": 1}{}'])
def test_what_is_no_object_is_refused_by_both(engine_http: httpx.Client, ours: httpx.Client, body: bytes, old: bool):
    # An old vLLM may close the connection after such an answer.
    headers = {"content-type": "application/json", "connection": "close"}
    replies = [client.post(CHAT, content=body, headers=headers) for client in (engine_http, ours)]
    assert [reply.status_code for reply in replies] in ([400, 400], *([[500, 400]] if old else []))
    assert set(replies[1].json()["error"]) == {"message", "type", "param", "code"}


PASSED: dict[str, tuple[str, Json]] = {
    "tokens of a prompt": ("/tokenize", {"prompt": SIGNS, "return_token_strs": True}),
    "tokens of a chat": ("/tokenize", {"messages": [SYSTEM, USER], "add_generation_prompt": True}),
    "tokens of nothing": ("/tokenize", {}),
    "words": ("/detokenize", {"tokens": [70, 71, 257]}),
    "words of no tokens": ("/detokenize", {"tokens": "a"}),
    "a message counted": ("/v1/messages/count_tokens", {"messages": [USER], "max_tokens": 1}),
    "a message": ("/v1/messages", {"messages": [USER], "max_tokens": 6, "temperature": 0}),
    "a message stopped": (
        "/v1/messages",
        {"messages": [user("Who?")], "system": "Be kind.", "stop_sequences": ["<"], "max_tokens": 9, "temperature": 0},
    ),
    "a response": ("/v1/responses", {"input": "Hi.", "max_output_tokens": 6, "temperature": 0}),
    "a response instructed": (
        "/v1/responses",
        {"input": [USER], "instructions": "Be kind.", "max_output_tokens": 6, "temperature": 0, "store": False},
    ),
}


@pytest.mark.parametrize(("path", "body"), PASSED.values(), ids=PASSED)
def test_other_routes_answer_as_vllms(
    engine_http: httpx.Client, ours: httpx.Client, served: str, path: str, body: Json
):
    assert_alike(engine_http, ours, path, {"model": served, **body})


def test_models_are_told_as_by_vllm(engine_http: httpx.Client, ours: httpx.Client, served: str) -> None:
    theirs = engine_http.get("/v1/models").json()
    assert masked(ours.get("/v1/models").json()) == masked(theirs)
    assert masked(ours.get(f"/v1/models/{served}").json()) == masked(theirs["data"][0])
    assert ours.get("/v1/models/unknown").status_code == 404


#: All that clients can ask of an engine through us. Everything else that it has is for its owner.
PUBLIC = {
    *(CHAT, TEXT, "/v1/responses", "/v1/responses/{response_id}"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/tokenize", "/detokenize"),
    *("/version", "/ping", "/tokenizer_info"),
    # Both have these, and ours tell of us.
    *("/health", "/metrics", "/docs", "/openapi.json"),
}

#: What vLLM does not write into its own list, or has only if it is started otherwise.
UNLISTED = {
    *("/start_profile", "/stop_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/redoc", "/v1/embeddings", "/pooling", "/score", "/rerank", "/v1/audio/transcriptions", "/v1/realtime"),
    *("/update_weights", "/sleep", "/wake_up", "/collective_rpc", "/version", "/server_info", "/invocations"),
}


def test_nothing_else_of_an_engine_can_be_reached(engine_http: httpx.Client, ours: httpx.Client) -> None:
    listed = engine_http.get("/openapi.json").json()["paths"]
    assert len(listed) > 20
    assert {"/pause", "/collective_rpc", "/reset_prefix_cache"} <= set(listed)
    for route in (set(listed) | UNLISTED) - PUBLIC:
        for path in (route, f"{route}/", f"/{route}", f"/v1/models/..{route}", route.replace("/", "/%2e/", 1)):
            for method in {"GET", "POST", *(each.upper() for each in listed.get(route, {}))}:
                # So that /v1/chat/completions/batch is no bad change of a stored completion called batch.
                url = str(ours.base_url).rstrip("/") + path  # httpx would take //route for a host
                found = ours.request(method, url, json={"metadata": {}}, follow_redirects=True).status_code
                # There, what stands behind the slash is the id of a response, which can be got and not changed.
                refused = {404, 405} if path.startswith("/v1/responses/") else {404}
                assert found in refused, (method, path, found)


def test_what_both_have_is_ours(engine_http: httpx.Client, ours: httpx.Client) -> None:
    assert "vllm:" in engine_http.get("/metrics").text
    assert "vllm:" not in ours.get("/metrics").text
