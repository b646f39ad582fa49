"""Instructions of any role are in the prompt, whatever the chat template makes of them, or the request is refused."""

import json
from typing import Any

import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.running import RunningExplorer

pytestmark = pytest.mark.contract

Json = dict[str, Any]

MERGED = "x-tuneloop-merged-system"

_BEGIN = "{% if tools %}{{ tools | length }} tools\n{% endif %}{% for message in messages %}"
_SAID = "{{ message.role }}: {{ message.content }}\n"
_END = "{% endfor %}"

#: As Qwen's newer ones.
STRICT = (
    f"{_BEGIN}{{% if message.role == 'system' and not loop.first %}}{{{{ raise_exception('System must be first') }}}}"
    "{% elif message.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('No such role') }}"
    f"{{% endif %}}{_SAID}{_END}"
)
#: As many that list the roles they know.
SKIPPING = (
    f"{_BEGIN}{{% if message.role in ('user', 'assistant', 'tool') or (message.role == 'system' and loop.first) %}}"
    f"{_SAID}{{% endif %}}{_END}"
)
#: Keeps the last system message alone.
OVERWRITING = (
    f"{_BEGIN}{{% if message.role == 'user' %}}{_SAID}{{% endif %}}{_END}"
    "{% for message in messages if message.role == 'system' %}{% if loop.last %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)
NATIVE = f"{_BEGIN}{_SAID}{_END}"
WITHOUT_SYSTEM = f"{_BEGIN}{{% if message.role == 'user' %}}{_SAID}{{% endif %}}{_END}"

LOSING = {"raises": STRICT, "skips": SKIPPING, "overwrites": OVERWRITING}


def turn(role: str, content: Any) -> Json:
    return {"role": role, "content": content}


CHATS = {
    "a developer": [turn("developer", "be brief"), turn("user", "hi")],
    "a developer after the system": [turn("system", "be kind"), turn("developer", "be brief"), turn("user", "hi")],
    "a system in the middle": [turn("user", "hi"), turn("system", "be brief"), turn("user", "and now?")],
    "in parts": [
        turn("system", [{"type": "text", "text": "be kind"}]),
        turn("user", "hi"),
        turn("developer", [{"type": "text", "text": "be brief"}, {"type": "text", "text": "always"}]),
    ],
}


@pytest.mark.parametrize("template", [STRICT, SKIPPING], ids=["raises", "skips"])
@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_instructions_of_a_chat_are_in_the_prompt(
    explorer: RunningExplorer, double: EngineDouble, template: str, messages: list[Json]
) -> None:
    double.template = template
    answer = explorer.chat(messages=messages)
    assert (answer.status_code, answer.headers[MERGED]) == (200, "1")
    prompt = double.prompt_of(**double.chats[-1].body)
    assert "be brief" in prompt.partition("hi")[0]
    assert ("be kind" in prompt) is ("be kind" in str(messages))
    # What the client sent is what is stored.
    assert json.loads(explorer.exchanges()[-1].request)["messages"] == messages


def test_an_instruction_that_a_later_one_would_overwrite_is_in_the_prompt(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.template = OVERWRITING
    messages = [turn("system", "be kind"), turn("user", "hi"), turn("system", "be brief"), turn("user", "and now?")]
    assert explorer.chat(messages=messages).headers[MERGED] == "1"
    assert "be kind\n\nbe brief" in double.prompt_of(**double.chats[-1].body)


def test_merged_instructions_stand_in_their_order_with_a_blank_line_between(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.template = SKIPPING
    messages = [turn("system", "one"), turn("user", "hi"), turn("developer", "two"), turn("system", "three")]
    assert explorer.chat(messages=messages).headers[MERGED] == "2"
    assert double.chats[-1].body["messages"] == [turn("system", "one\n\ntwo\n\nthree"), turn("user", "hi")]


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_what_the_template_takes_is_left_as_it_is(
    explorer: RunningExplorer, double: EngineDouble, messages: list[Json]
) -> None:
    double.template = NATIVE
    answer = explorer.chat(messages=messages)
    assert (answer.status_code, MERGED in answer.headers) == (200, False)
    assert double.chats[-1].body["messages"] == messages


def test_where_the_template_cannot_be_asked_instructions_are_merged(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.no_tokenizer = True
    assert explorer.chat(messages=CHATS["a developer"]).headers[MERGED] == "1"
    assert double.chats[-1].body["messages"] == [turn("system", "be brief"), turn("user", "hi")]


def test_an_instruction_that_no_place_of_the_template_shows_is_refused(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.template = WITHOUT_SYSTEM
    answer = explorer.chat(messages=CHATS["a developer"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "instructions_not_in_prompt")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    double.template = STRICT
    answer = explorer.chat(messages=[turn("user", "hi"), turn("system", [image])])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
    assert not double.chats


#: Of Claude Code.
MESSAGES: Json = {
    "model": "t",
    "max_tokens": 8,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        turn("user", [{"type": "text", "text": "hi"}]),
        turn("system", "be brief"),
        turn("user", "and now?"),
    ],
    "tools": [{"name": "Bash", "input_schema": {"type": "object"}}],
}


@pytest.mark.parametrize("template", LOSING.values(), ids=LOSING)
def test_instructions_of_messages_are_in_the_prompt_and_counted(
    explorer: RunningExplorer, double: EngineDouble, template: str
) -> None:
    double.template = template
    answer = explorer.http.post("/v1/messages", json=MESSAGES)
    assert (answer.status_code, answer.headers[MERGED]) == (200, "1")
    assert double.chats[-1].body["messages"][0] == turn("system", "be kind\n\nbe brief")
    counted = explorer.http.post("/v1/messages/count_tokens", json=MESSAGES | {"max_tokens": None})
    assert counted.headers[MERGED] == "1"
    body = json.loads(double.passed[-1][1])
    assert (body["system"], [each["role"] for each in body["messages"]]) == ("be kind\n\nbe brief", ["user", "user"])


@pytest.mark.parametrize("template", LOSING.values(), ids=LOSING)
def test_tokens_are_those_of_the_prompt_that_is_sent(
    explorer: RunningExplorer, double: EngineDouble, template: str
) -> None:
    double.template = template
    messages = CHATS["a developer after the system"]
    answer = explorer.http.post("/tokenize", json={"messages": messages})
    assert answer.headers[MERGED] == "1"
    explorer.chat(messages=messages)
    assert bytes(answer.json()["tokens"]).decode() == double.prompt_of(**double.chats[-1].body)


#: Of Codex.
RESPONSE: Json = {
    "model": "t",
    "instructions": "be kind",
    "input": [
        turn("developer", [{"type": "input_text", "text": "be brief"}]) | {"type": "message"},
        turn("user", [{"type": "input_text", "text": "hi"}]) | {"type": "message"},
    ],
    "tools": [{"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"x": "y"},
}
NAMESPACE = {"type": "namespace", "name": "mcp", "description": "d", "tools": RESPONSE["tools"]}
HOSTED = [*RESPONSE["tools"], {"type": "custom", "name": "patch"}, {"type": "web_search"}, NAMESPACE]


@pytest.mark.parametrize("template", LOSING.values(), ids=LOSING)
@pytest.mark.parametrize("stream", [True, False])
def test_instructions_of_a_response_are_in_the_prompt(
    explorer: RunningExplorer, double: EngineDouble, template: str, stream: bool
) -> None:
    double.template = template
    answer = explorer.http.post("/v1/responses", json=RESPONSE | {"stream": stream, "tools": HOSTED})
    assert (answer.status_code, answer.headers[MERGED]) == (200, "1")
    assert answer.headers["x-tuneloop-ignored"] == "tools.web_search"
    assert double.chats[-1].body["messages"] == [
        turn("system", "be kind\n\nbe brief"),
        turn("user", [{"type": "text", "text": "hi"}]),
    ]
    assert "be kind" in answer.text  # the response repeats the client's own instructions
    assert "be brief" not in answer.text


@pytest.mark.parametrize("messages", [5, None, [5], [turn("system", 5)], [turn("system", "be"), turn("developer", 5)]])
def test_what_is_no_conversation_is_left_to_the_engine(
    explorer: RunningExplorer, double: EngineDouble, messages: Any
) -> None:
    double.template = STRICT
    for path in (CHAT, "/tokenize", "/v1/messages/count_tokens"):
        answer = explorer.http.post(path, json={"model": "t", "messages": messages})
        assert answer.status_code in (200, 400)
        assert MERGED not in answer.headers
