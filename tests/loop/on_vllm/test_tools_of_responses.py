"""Tools of responses, and responses asked for again, through two workers next to vLLM itself."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.loop.harness.bare_engine import MODEL, attached_to
from tests.loop.harness.services import Service, ledger_of, running, wait_for, write_settings
from tests.loop.on_vllm.likeness import Json, assert_alike, is_old, masked, nearly
from tuneloop.shared.ledger.ledger import Ledger

pytestmark = pytest.mark.vllm

RESPONSES = "/v1/responses"

FUNCTION: Json = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
CUSTOM: Json = {"type": "custom", "name": "shell", "description": "Runs a line."}


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory, model: Path, bare_engine: httpx.Client) -> Iterator[Service]:
    """Two workers, whose engine keeps responses."""
    config = write_settings(tmp_path_factory.mktemp("responding"), model)
    values = yaml.safe_load(config.read_text())
    values["model"]["served_model_name"] = MODEL
    values["explorer"] |= {"workers": 2, "rollout_model": attached_to(bare_engine)}
    config.write_text(yaml.safe_dump(values))
    with running(config) as service:
        yield service


@pytest.fixture(scope="module")
def engine(bare_engine: httpx.Client) -> httpx.Client:
    return bare_engine


@pytest.fixture(scope="module")
def kept(explorer: Service) -> Iterator[Ledger]:
    ledger = ledger_of(explorer.settings)
    yield ledger
    assert ledger.reports.imbalance() == []
    ledger.close()


@pytest.fixture
def ours(explorer: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=explorer.url, timeout=60) as client:
        yield client


@pytest.fixture
def anybody(explorer: Service) -> Callable[[], httpx.Client]:
    """A client on a new connection: the kernel gives it to one of the workers."""
    return lambda: httpx.Client(base_url=explorer.url, timeout=60, headers={"connection": "close"})


@pytest.fixture
def common(explorer: Service) -> Json:
    return {"model": explorer.settings.served_model_name, "input": "Hi.", "max_output_tokens": 6, "temperature": 0}


#: What Claude Code looks for.
_MOST = r"max_tokens: 32000 > 4096, which is the maximum allowed number of output tokens for this model"

TRANSLATED: dict[str, Json] = {
    "a custom tool": {"tools": [CUSTOM]},
    "a custom tool among others": {"tools": [CUSTOM, FUNCTION], "parallel_tool_calls": False},
    "a namespace": {"tools": [{"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION]}]},
    "a search that nobody runs": {"tools": [FUNCTION, {"type": "web_search_preview"}]},
    "a chosen custom tool": {"tools": [CUSTOM, FUNCTION], "tool_choice": {"type": "custom", "name": "shell"}},
}


def test_a_response_is_told_again_as_by_vllm(
    engine: httpx.Client, anybody: Callable[[], httpx.Client], common: Json
) -> None:
    if is_old(engine):
        pytest.skip("an older vLLM puts the tools of a response into other words")
    for more in ({}, {"instructions": "Be kind.", "metadata": {"a": "b"}, "max_output_tokens": 20}, {"stream": True}):
        body = common | {"tools": [FUNCTION]} | more
        with anybody() as first:
            reply = first.post(RESPONSES, json=body)
        told = _events(reply.text)[-1]["response"] if "stream" in more else reply.json()
        with anybody() as second:
            again = second.get(f"{RESPONSES}/{told['id']}")
        assert (again.status_code, again.json()) == (200, told)
        name = engine.post(RESPONSES, json=body | {"stream": False}).json()["id"]
        theirs = engine.get(f"{RESPONSES}/{name}").json()
        assert _comparable(again.json()) == nearly(_comparable(theirs))
    for client in (engine, anybody()):
        reply = client.get(f"{RESPONSES}/resp_x")
        assert reply.status_code == 404
        assert reply.json()["error"]["message"] == "Response with id 'resp_x' not found."


@pytest.mark.parametrize("more", TRANSLATED.values(), ids=TRANSLATED)
def test_tools_of_other_kinds_are_put_as_vllm_puts_them_and_their_replies_have_ids(
    engine: httpx.Client, ours: httpx.Client, kept: Ledger, common: Json, more: Json
) -> None:
    if is_old(engine):
        pytest.skip("an older vLLM has no such tools")
    body = common | more | {"max_output_tokens": 40}
    theirs, told = (each.post(RESPONSES, json=body) for each in (engine, ours))
    assert (told.status_code, theirs.status_code) == (200, 200), told.text + theirs.text
    assert told.json()["usage"]["input_tokens"] == theirs.json()["usage"]["input_tokens"]
    assert [each["type"] for each in told.json()["output"]] == [each["type"] for each in theirs.json()["output"]]
    name = told.json()["id"]
    wait_for(lambda: bool(kept.exports.replies_named("default", [name])), why="it was not recorded")
    [row] = kept.exports.replies_named("default", [name])
    prompt, completion, _ = row.numbers
    assert (len(prompt), len(completion)) == tuple(told.json()["usage"][f"{each}put_tokens"] for each in ("in", "out"))
    assert row.reason is None


def test_what_is_too_long_is_told_as_clients_read_it(ours: httpx.Client) -> None:
    said = {"model": MODEL, "messages": [{"role": "user", "content": "a " * 3000}], "max_tokens": 5}
    for path, body in (("/v1/chat/completions", said), (RESPONSES, {"model": MODEL, "input": "a " * 3000})):
        answer = ours.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded"), answer.text
    for more, why in (
        ({}, r"prompt is too long: (\d+) tokens > 4096 maximum"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 32000}, _MOST),
    ):
        answer = ours.post("/v1/messages", json=said | more)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert re.fullmatch(why, answer.json()["error"]["message"]), answer.text


def test_custom_calls_are_heard_as_by_vllm(engine: httpx.Client, ours: httpx.Client, common: Json) -> None:
    if is_old(engine):
        pytest.skip("an older vLLM answers 500")
    heard = [
        {"role": "user", "content": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "shell", "input": 'echo "ü"'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ü"},
    ]
    assert_alike(engine, ours, RESPONSES, common | {"input": heard})


def _events(text: str) -> list[Json]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def _comparable(told: Any) -> Any:
    """Without ids, times, and what was in the engine's cache."""
    told = masked(told)
    return _without(told)


def _without(told: Any) -> Any:
    if isinstance(told, dict):
        gone = {"item_id", "previous_response_id", "cached_tokens", "cache_write_tokens"}
        return {key: _without(value) for key, value in told.items() if key not in gone}
    return [_without(each) for each in told] if isinstance(told, list) else told
