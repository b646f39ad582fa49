"""What agents need beside a reply: other names of the model, limits, tools that nobody here runs, `store: false`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import MODEL, EngineDouble, EnginePlace
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.shared.ledger.explorers import NOT_STORED
from tuneloop.shared.operations.doctor import as_json, as_text, examine_experiment
from tuneloop.shared.settings.feedback import TenantSettings
from tuneloop.shared.settings.serving import AliasSettings
from tuneloop.shared.settings.settings import Settings

pytestmark = pytest.mark.contract

Json = dict[str, Any]

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
MESSAGE: Json = {"model": MODEL, "max_tokens": 12, "messages": HELLO["messages"]}
BODIES: dict[str, Json] = {
    CHAT: HELLO,
    MESSAGES: MESSAGE,
    RESPONSES: {"model": MODEL, "input": "3+4=", "max_output_tokens": 12},
}
NAMES = ("org/other", "small")
ADD: Json = {"name": "add", "input_schema": {"type": "object"}}
SEARCH: Json = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}

#: What vLLM 0.32 says: the prompt's tokens, its characters, or no room for a reply.
TOO_LONG = {
    "tokens": (
        "This model's maximum context length is 4096 tokens. However, your prompt contains 5000 input tokens, which"
        " exceeds this limit even without any output tokens.",
        "prompt is too long: 5000 tokens > 4096 maximum",
    ),
    "at least": (
        "This model's maximum context length is 4096 tokens. However, your prompt contains at least 4097 input tokens.",
        "prompt is too long: 4097 tokens > 4096 maximum",
    ),
    "characters": (
        "This model's maximum context length is 4096 tokens. However, your prompt contains 90000 characters (more than"
        " 8192 characters, which is the upper bound for 4096 input tokens).",
        "prompt is too long: 4097 tokens > 4096 maximum",
    ),
    "no room": (
        "The decoder prompt (length 4096) plus the number of requested output tokens (at least 1) is longer than the"
        " maximum model length of 4096.",
        "prompt is too long: 4097 tokens > 4096 maximum",
    ),
    "the reply": (
        "max_completion_tokens=32000 cannot be greater than max_model_len=max_total_tokens=4096. Please request fewer"
        " output tokens.",
        "max_tokens: 32000 > 4096, which is the maximum allowed number of output tokens for this model",
    ),
}


class RefusingDouble(EngineDouble):
    """An engine that refuses every chat with a sentence."""

    says = ""

    async def _chat(self, scope: Any, body: bytes, send: Any) -> None:
        error = {"error": {"message": self.says, "type": "BadRequestError", "param": "input_tokens", "code": 400}}
        head = {"type": "http.response.start", "status": 400, "headers": [(b"content-type", b"application/json")]}
        await send(head)
        await send({"type": "http.response.body", "body": json.dumps(error).encode()})


def agents_settings(folder: Path, url: str, store: Any = True) -> Settings:
    settings = settings_for(folder, [url], clamp_max_tokens=True)
    aliases = {NAMES[0]: AliasSettings(), NAMES[1]: AliasSettings(train=False)}
    model = settings.model.model_copy(update={"aliases": aliases})
    return settings.model_copy(update={"model": model, "tenants": {"default": TenantSettings(store=store)}})


@pytest.fixture
def agents(tmp_path: Path, double: EngineDouble) -> Iterator[RunningExplorer]:
    with explorer_running(agents_settings(tmp_path, double.url, "always")) as explorer:
        yield explorer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_reply_has_the_name_that_was_asked(
    agents: RunningExplorer, double: EngineDouble, path: str, stream: bool
) -> None:
    for name in (*NAMES, MODEL):
        answer = agents.http.post(path, json=BODIES[path] | {"model": name, "stream": stream})
        assert answer.status_code == 200, answer.text
        told = answer.text.replace(" ", "")
        assert {each for each in (*NAMES, MODEL) if f'"model":"{each}"' in told} == {name}
        assert double.chats[-1].body["model"] == MODEL
    kept = agents.exchanges()
    assert [json.loads(each.request)["model"] for each in kept] == [*NAMES, MODEL]
    assert [each.experiences[0].drop_reason for each in kept] == [None, "opt_out", None]
    assert all(len(each.experiences[0].completion_ids) > 4 for each in kept)


def test_other_names_are_listed_and_counted_with(agents: RunningExplorer, double: EngineDouble) -> None:
    listed = agents.http.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == [MODEL, *NAMES]
    for name in (MODEL, *NAMES):
        assert agents.http.get(f"/v1/models/{name}").json()["id"] == name
    assert agents.http.get("/v1/models/none").status_code == 404
    assert agents.http.post("/tokenize", json={"model": NAMES[0], "prompt": "hi"}).status_code == 200
    assert json.loads(double.passed[-1][1])["model"] == MODEL
    assert agents.http.post(CHAT, json=HELLO | {"model": "none"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "max_tokens"), (MESSAGES, "max_tokens"), (RESPONSES, "max_output_tokens")]
)
def test_more_tokens_than_the_context_has_are_clamped(
    agents: RunningExplorer, double: EngineDouble, path: str, field: str
) -> None:
    limit = agents.http.get("/v1/models").json()["data"][0]["max_model_len"]
    answer = agents.http.post(path, json=BODIES[path] | {field: limit + 1})
    assert (answer.status_code, answer.headers["x-tuneloop-clamped"]) == (200, field)
    sent = double.chats[-1].body
    assert (sent.get("max_tokens") or sent["max_completion_tokens"]) == limit
    assert "x-tuneloop-clamped" not in agents.http.post(path, json=BODIES[path]).headers


def test_store_false_may_mean_the_providers_storage(agents: RunningExplorer) -> None:
    for path, body in BODIES.items():
        answer = agents.http.post(path, json=body | {"store": False})
        assert (answer.status_code, answer.headers["x-tuneloop-ignored"]) == (200, "store"), path
        assert agents.feedback(answer.json()["id"]).json()["accepted"] == 1
    assert [each.experiences[0].drop_reason for each in agents.exchanges()] == [None] * len(BODIES)


def test_the_doctor_counts_what_was_not_kept(tmp_path: Path, double: EngineDouble) -> None:
    with explorer_running(agents_settings(tmp_path, double.url)) as explorer:
        for _ in range(3):
            assert "x-tuneloop-ignored" not in explorer.chat(store=False).headers
        assert explorer.exchanges() == []
        eventually(lambda: bool(explorer.ledger.explorers.counts(NOT_STORED)))
        # This ledger has no migrations, so that the doctor takes it for one that was never used.
        report = examine_experiment(explorer.settings)._replace(not_stored=explorer.ledger.explorers.counts(NOT_STORED))
        assert as_json(report)["not_stored"] == {"store_false": 3}
        [line] = [each for each in as_text(report, explorer.settings) if "not kept" in each]
        assert "3 store_false" in line
        assert "tenants.NAME.store: always" in line


@pytest.mark.parametrize("says", TOO_LONG.values(), ids=TOO_LONG)
def test_what_is_too_long_is_told_as_clients_read_it(
    places: list[EnginePlace], tmp_path: Path, says: tuple[str, str]
) -> None:
    engine = RefusingDouble(url=places[0].url, began_at=places[0].fresh().began_at)
    engine.says = says[0]
    places[0].double = engine
    with explorer_running(settings_for(tmp_path, [engine.url])) as explorer:
        for path, body in BODIES.items():
            for stream in (False, True):
                answer = explorer.http.post(path, json=body | {"stream": stream})
                error = answer.json()["error"]
                assert answer.status_code == 400
                if path == MESSAGES:
                    assert error == {"type": "invalid_request_error", "message": says[1]}
                else:
                    assert (error["code"], error["message"]) == ("context_length_exceeded", says[0])


def test_a_tool_that_runs_at_the_provider_is_left_out_or_refused(agents: RunningExplorer, double: EngineDouble) -> None:
    tools = [ADD, SEARCH, {"type": "custom", **ADD, "name": "sub"}]
    answer = agents.http.post(MESSAGES, json=MESSAGE | {"tools": tools})
    assert (answer.status_code, answer.headers["x-tuneloop-ignored"]) == (200, "tools.web_search_20250305")
    assert [each["function"]["name"] for each in double.chats[-1].body["tools"]] == ["add", "sub"]
    for path, tool in ((MESSAGES, SEARCH), (RESPONSES, {"type": "web_search"})):
        alone = agents.http.post(path, json=BODIES[path] | {"tools": [tool]})
        assert alone.status_code == 400
        assert "no model here can call them" in alone.json()["error"]["message"]
    space = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]}
    answer = agents.http.post(RESPONSES, json=BODIES[RESPONSES] | {"tools": [space]})
    assert (answer.status_code, answer.headers["x-tuneloop-ignored"]) == (200, "tools.web_search")
    counted = agents.http.post(f"{MESSAGES}/count_tokens", json=MESSAGE | {"tools": [ADD, SEARCH]})
    assert json.loads(double.passed[-1][1])["tools"] == [ADD], counted.text


def test_a_conversation_of_an_empty_block_is_one_of_no_text(agents: RunningExplorer, double: EngineDouble) -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": ""}]}
    assert agents.http.post(MESSAGES, json=MESSAGE | {"messages": [turn], "system": "be kind"}).status_code == 200
    assert double.chats[-1].body["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": ""},
    ]


def test_a_head_of_the_start_page_is_answered(agents: RunningExplorer) -> None:
    assert agents.http.head("/").status_code == 200


@pytest.mark.parametrize(("tokens", "budget", "marked"), [(8, 1024, False), (8, 20, True), (8, None, False)])
def test_a_budget_of_reasoning_marks_a_reply_that_may_have_reached_it(
    agents: RunningExplorer, double: EngineDouble, tokens: int, budget: int | None, marked: bool
) -> None:
    more = {} if budget is None else {"thinking_token_budget": budget}
    assert agents.chat(**more).status_code == 200
    [experience] = agents.exchanges()[-1].experiences
    assert len(experience.completion_ids) // 4 >= tokens
    assert experience.unsampled == ("sampling:thinking_token_budget" if marked else None)
