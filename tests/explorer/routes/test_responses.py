"""Responses that are refused, and responses read again, through a running explorer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.engine import MODEL, EngineDouble, EnginePlace
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.shared.experience import Exchange

pytestmark = pytest.mark.contract

Json = dict[str, Any]

RESPONSES = "/v1/responses"

PLAIN: Json = {"model": MODEL, "input": "3+4=", "max_output_tokens": 12}


@pytest.fixture(scope="module")
def explorer(places: list[EnginePlace], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExplorer]:
    """One explorer with two engines for all tests here."""
    for place in places:
        place.double = EngineDouble(url=place.url)
    folder: Path = tmp_path_factory.mktemp("responses")
    with explorer_running(settings_for(folder, [place.url for place in places], max_in_flight=3, max_waiting=0)) as it:
        yield it


@pytest.fixture
def engines(places: list[EnginePlace], explorer: RunningExplorer) -> Iterator[list[EngineDouble]]:
    """The two engines, new for each test."""
    # The same lives of them: an engine that was started anew is given its weights first.
    doubles = [EngineDouble(url=place.url, began_at=place.double.began_at) for place in places]
    for place, double in zip(places, doubles, strict=True):
        place.double = double
    yield doubles
    eventually(lambda: explorer.services.proxy.admission.in_flight == 0)
    assert all(engine.in_flight == 0 for engine in explorer.services.fleet.engines)


def post(explorer: RunningExplorer, body: Json, **more: Any) -> httpx.Response:
    return explorer.http.post(RESPONSES, json=body, **more)


def again(explorer: RunningExplorer, response_id: str, query: str = "") -> httpx.Response:
    return explorer.http.get(f"{RESPONSES}/{response_id}{query}")


def kept_as(explorer: RunningExplorer, msg_id: str) -> Exchange | None:
    return next((each for each in explorer.exchanges() if each.msg_id == msg_id), None)


def events(text: str) -> list[Json]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_in_the_background_is_refused_before_an_engine_is_asked(
    explorer: RunningExplorer, engines: list[EngineDouble], stream: bool
) -> None:
    reply = post(explorer, PLAIN | {"background": True, "stream": stream})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "background")
    assert "send the request without `background`" in reply.json()["error"]["message"]
    assert not any(each.chats for each in engines)
    assert post(explorer, PLAIN | {"background": False}).status_code == 200


SAID_AGAIN: dict[str, Json] = {
    "words": {},
    "instructed": {"instructions": "Be short.", "metadata": {"a": 1}, "temperature": 0.5, "user": "u"},
    "no limit": {"max_output_tokens": None},
    "tools": {"tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}]},
}


@pytest.mark.parametrize("more", SAID_AGAIN.values(), ids=SAID_AGAIN)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_of_ours_is_told_again_as_it_was(
    explorer: RunningExplorer, engines: list[EngineDouble], more: Json, stream: bool
) -> None:
    reply = post(explorer, PLAIN | more | {"stream": stream})
    answer = events(reply.text)[-1]["response"] if stream else reply.json()
    found = again(explorer, answer["id"])
    assert found.status_code == 200
    differ = {key for key, value in found.json().items() if answer[key] != value}
    assert differ <= ({"max_output_tokens"} if stream else set())  # the double's streams begin without usage
    assert again(explorer, answer["id"], "?stream=true").status_code == 400


@pytest.mark.parametrize(
    "field",
    [
        {"conversation": "conv_1"},
        {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
        {"enable_response_messages": True},
        {"previous_input_messages": [{"role": "user", "content": "x"}]},
    ],
)
def test_what_an_engine_would_leave_out_is_refused_and_not_recorded(
    explorer: RunningExplorer, engines: list[EngineDouble], field: Json
) -> None:
    before = len(explorer.exchanges())
    answer = post(explorer, PLAIN | field)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported", next(iter(field)))
    assert len(explorer.exchanges()) == before
    assert post(explorer, PLAIN | dict.fromkeys(field)).status_code == 200


def test_what_is_no_response_of_ours_is_not_found(explorer: RunningExplorer, engines: list[EngineDouble]) -> None:
    chat = explorer.chat().json()["id"]
    response = post(explorer, PLAIN).json()["id"]
    forgotten = post(explorer, PLAIN | {"store": False}).json()["id"]
    wrong = (forgotten, "resp_x", chat, "resp_" + chat.removeprefix("chatcmpl-"), f"{response}:0", "..")
    for name in wrong[:-1]:
        reply = again(explorer, name)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (404, "response_id", "not_found"), name
        assert error["message"] == f"Response with id '{name}' not found."
    assert again(explorer, response, "?stream=false").status_code == 200
