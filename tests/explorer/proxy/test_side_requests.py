"""Requests that are no part of a run's conversation: known by their words, or marked; a run's thumb reaches none."""

import json
from typing import Any

import httpx
import pytest

from tests.doubles.engine import MODEL
from tests.explorer.running import HELLO, RunningExplorer
from tuneloop.explorer.proxy.side_requests import is_side_request
from tuneloop.runner.models.run import Run

pytestmark = pytest.mark.contract

Json = dict[str, Any]

BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.0b8; cc_entrypoint=cli;"}
TITLE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "json_schema", "schema": {"type": "object", "properties": {"title": {"type": "string"}}}},
}
SUMMARY = "Your task is to create a detailed summary of the conversation so far."
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def asked(text: str, *before: Json) -> Json:
    return {"messages": [*before, {"role": "user", "content": text}]}


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def of_codex(**told: str) -> Json:
    return {"client_metadata": {"session_id": "s", "x-codex-turn-metadata": json.dumps(told)}}


SIDE: dict[str, tuple[Json, Json, str]] = {
    "Claude Code's title": ({"system": [BILLING]}, asked("<session>") | {"response_format": TITLE_FORMAT}, ""),
    "its title, by its name": ({}, asked("<session>") | {"response_format": TITLE_FORMAT}, "claude-cli/2.1.332 (cli)"),
    "its older title": ({}, asked("hi", system("Generate a concise, sentence-case title (3-7 words)")), ""),
    "its summary": (
        {},
        asked("Your task is to create a detailed summary of the conversation so far.") | {"tools": TOOLS},
        "",
    ),
    "its summary, told twice": (
        {},
        asked("CRITICAL: Respond with TEXT ONLY.\n\nYour task is to create a detailed summary of it"),
        "",
    ),
    "its suggestion": ({}, asked("[SUGGESTION MODE: Suggest what the user might naturally type next."), ""),
    "Codex' summary": (of_codex(request_kind="compaction"), asked("hi"), "codex_exec/0.171.0"),
    "an older Codex' summary": ({}, asked("You are performing a CONTEXT CHECKPOINT COMPACTION. Create a"), ""),
    "OpenCode's title": ({}, asked("hi", system("You are a title generator. You output ONLY a thread title.")), ""),
    "Open WebUI's title": ({}, asked("### Task:\nGenerate a concise, 3-5 word title with an emoji"), ""),
    "Open WebUI's tags": ({}, asked("### Task:\nGenerate 1-3 broad tags categorizing the main themes"), ""),
    "Open WebUI's questions": ({}, asked("### Task:\nSuggest 3-5 relevant follow-up questions"), ""),
}

OWN: dict[str, tuple[Json, Json, str]] = {
    "a turn of Claude Code": ({"system": [BILLING]}, asked("hi") | {"tools": TOOLS}, "claude-cli/2.1.332"),
    "its answer in JSON": ({"system": [BILLING]}, asked("hi") | {"response_format": TITLE_FORMAT, "tools": TOOLS}, ""),
    "an application's title": ({}, asked("Name it.") | {"response_format": TITLE_FORMAT}, "python"),
    "a turn of Codex": (of_codex(request_kind="turn"), asked("hi"), ""),
    "Codex without a word of it": (of_codex(turn_id="t"), asked("hi"), ""),
    "Codex' metadata that nobody reads": ({"client_metadata": {"x-codex-turn-metadata": "{"}}, asked("hi"), ""),
    "Open WebUI's answer from documents": ({}, asked("### Task:\nRespond to the user query using the context"), ""),
    "a summary that somebody reads": (
        {},
        {"messages": [{"role": "tool", "content": "Your task is to create a detailed summary of"}]},
        "",
    ),
    "no conversation": ({}, {"prompt": "You are a title generator"}, ""),
    "no messages": ({}, {"messages": [5]}, ""),
    "no schema": (
        {},
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"json_schema": None}},
        "claude-cli/2",
    ),
}


@pytest.mark.parametrize(("body", "chat", "agent"), SIDE.values(), ids=SIDE)
def test_a_side_request_is_known(body: Json, chat: Json, agent: str) -> None:
    assert is_side_request(body, chat, agent)


@pytest.mark.parametrize(("body", "chat", "agent"), OWN.values(), ids=OWN)
def test_a_conversations_own_request_is_none(body: Json, chat: Json, agent: str) -> None:
    assert not is_side_request(body, chat, agent)


def test_a_runs_thumb_reaches_none_that_is_marked_or_known(explorer: RunningExplorer) -> None:
    url = f"{Run(service=explorer.url, task_id='t', run_id='r', train=True).base_url}/chat/completions"

    def ask(headers: dict[str, str] | None = None, **more: Any) -> str:
        answer = httpx.post(url, json=HELLO | more, headers=headers)
        assert answer.status_code == 200, answer.text
        name: str = answer.json()["id"]
        return name

    own = [ask(), ask(metadata={"train": True})]
    marked = ask({"x-tuneloop-train": "false"})
    known = ask(messages=[system("You are a title generator."), *HELLO["messages"]])
    told = explorer.http.post("/feedback", json={"task_id": "t", "run_id": "r", "value": True}).json()
    assert told["replies"] == {"t/r": {"count": 2, "msg_ids": own}}
    assert explorer.commit().json()["committed"] == 2
    why = explorer.http.post("/feedback", json={"msg_ids": [marked, known], "value": True}).json()["not_trained"]
    assert why == {marked: "opt_out", known: "side_request"}
    # Outside a run nobody's word about others can reach it.
    lone = explorer.chat(messages=[system("You are a title generator."), *HELLO["messages"]]).json()["id"]
    assert "not_trained" not in explorer.feedback(lone).json()


def test_the_header_says_yes_or_no(explorer: RunningExplorer) -> None:
    answer = explorer.http.post("/v1/chat/completions", json=HELLO, headers={"x-tuneloop-train": "maybe"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-tuneloop-train")


@pytest.mark.parametrize(
    ("user", "person"),
    [
        ('{"device_id":"d1","account_uuid":"","session_id":"s1"}', "d1"),
        ("user_8d7f_account__session_29e07d92-01c0", "user_8d7f"),
        ("user_8d7f_account_11-22_session_29e07d92-01c0", "user_8d7f"),
        ('{"device_id":"d1"}', '{"device_id":"d1"}'),
        ('{"device_id":5,"session_id":"s"}', '{"device_id":5,"session_id":"s"}'),
        ("{ann", "{ann"),
        ("user_account", "user_account"),
    ],
)
def test_a_user_is_a_device_whatever_its_session(explorer: RunningExplorer, user: str, person: str) -> None:
    body = {"model": MODEL, "max_tokens": 12, "messages": HELLO["messages"]}
    assert explorer.http.post("/v1/messages", json=body | {"metadata": {"user_id": user}}).status_code == 200
    assert explorer.chat(user=user).status_code == 200
    assert [each.user for each in explorer.exchanges()] == [person, person]
