"""Responses that only the engine's own route can answer, and responses read again, through a running explorer."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.engine import MODEL, EnginePlace
from tests.doubles.responding import RESPONSES, RespondingDouble, message_item
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.shared.experience import Exchange, State

pytestmark = pytest.mark.contract

Json = dict[str, Any]

PLAIN: Json = {"model": MODEL, "input": "3+4=", "max_output_tokens": 12}
NATIVE: Json = PLAIN | {"enable_response_messages": True}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "add", "arguments": "{}", "status": "completed"}


@pytest.fixture(scope="module")
def explorer(places: list[EnginePlace], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExplorer]:
    """One explorer with two engines for all tests here."""
    for place in places:
        place.double = RespondingDouble(url=place.url)
    folder: Path = tmp_path_factory.mktemp("responses")
    with explorer_running(settings_for(folder, [place.url for place in places], max_in_flight=3, max_waiting=0)) as it:
        yield it


@pytest.fixture
def engines(places: list[EnginePlace], explorer: RunningExplorer) -> Iterator[list[RespondingDouble]]:
    """The two engines, new for each test."""
    # The same lives of them: an engine that was started anew is given its weights first.
    doubles = [RespondingDouble(url=place.url, began_at=place.double.began_at) for place in places]
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


def native_requests(engines: list[RespondingDouble]) -> Json:
    (found,) = [request for each in engines for request in each.native_requests]
    return found


ONLY_THERE = {
    "a choice of a hosted tool": PLAIN | {"tools": [{"type": "mcp"}], "tool_choice": {"type": "mcp"}},
    "messages as tokens": NATIVE,
}


@pytest.mark.parametrize("body", ONLY_THERE.values(), ids=ONLY_THERE)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_chat_completion_is_answered_by_the_engine_and_kept_without_ids(
    explorer: RunningExplorer, engines: list[RespondingDouble], body: Json, stream: bool
) -> None:
    body = body | {"stream": stream, "metadata": {"task_id": 7, "user_id": "u"}, "store": True, "temperature": 0.5}
    for engine in engines:
        engine.output = [message_item("Do"), CALL, message_item("ne.")]
    reply = post(explorer, body)
    assert reply.status_code == 200
    answer = events(reply.text)[-1]["response"] if stream else reply.json()
    assert answer["id"].startswith("resp_")
    assert answer["metadata"] == body["metadata"]
    assert answer["output"] == engines[0].output
    request = native_requests(engines)
    assert request == body | {"request_id": answer["id"], "store": False, "metadata": {"task_id": "7", "user_id": "u"}}
    kept = kept_as(explorer, answer["id"])
    assert kept is not None
    assert (kept.endpoint, json.loads(kept.request), kept.task_id) == (RESPONSES, body, "7")
    (experience,) = kept.experiences
    assert (experience.text, experience.finish_reason) == ("Done.", "tool_calls")
    assert json.loads(experience.tool_calls or b"")[0]["function"] == {"name": "add", "arguments": "{}"}
    assert (experience.prompt_ids, experience.completion_ids, experience.logprobs) == (b"", b"", b"")
    assert experience.drop_reason == "no_token_ids"


def test_what_has_no_ids_takes_feedback_but_is_never_trained_on(
    explorer: RunningExplorer, engines: list[RespondingDouble]
) -> None:
    before = explorer.counts()
    name = post(explorer, NATIVE).json()["id"]
    assert explorer.feedback(name).status_code == 200
    assert explorer.commit().status_code == 200
    after = explorer.counts()
    assert after[State.DROPPED] == before[State.DROPPED] + 1
    assert after[State.COMMITTED] == before[State.COMMITTED]
    assert explorer.rows(f"select reason from experiences where msg_id = '{name}'") == [("no_token_ids",)]


def test_a_client_cannot_choose_the_id(explorer: RunningExplorer, engines: list[RespondingDouble]) -> None:
    first = post(explorer, NATIVE).json()["id"]
    second = post(explorer, NATIVE | {"request_id": first}).json()["id"]
    assert first != second
    assert explorer.feedback(second).status_code == 200


def test_what_the_engine_refuses_is_refused_in_its_words(
    explorer: RunningExplorer, engines: list[RespondingDouble]
) -> None:
    assert post(explorer, NATIVE | {"metadata": []}).status_code == 400
    both = {"previous_response_id": "resp_x", "previous_input_messages": [{}]}
    assert post(explorer, PLAIN | both).json()["error"]["param"] == "previous_response_id"


def test_a_stream_that_breaks_off_says_so_and_is_kept_as_cut_off(
    explorer: RunningExplorer, engines: list[RespondingDouble]
) -> None:
    for engine in engines:
        engine.breaks_after = 2
    answer = events(post(explorer, NATIVE | {"stream": True}).text)
    assert [each["type"] for each in answer[-2:]] == ["error", "response.failed"]
    assert [each["sequence_number"] for each in answer] == list(range(len(answer)))
    kept = kept_as(explorer, answer[0]["response"]["id"])
    assert kept is not None
    assert (kept.experiences[0].text, kept.experiences[0].drop_reason) == ("Done.", "cut_off")


def replies(explorer: RunningExplorer, outcome: str) -> float:
    lines, name = explorer.http.get("/metrics").text.splitlines(), f'tuneloop_replies_total{{outcome="{outcome}"'
    return sum(float(each.split()[-1]) for each in lines if each.startswith(name))


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_failed_counts_as_a_failure(
    explorer: RunningExplorer, engines: list[RespondingDouble], stream: bool
) -> None:
    for each in engines:
        each.output, each.status_of_output = [], "failed"
    before = replies(explorer, "failed")
    answer = post(explorer, NATIVE | {"stream": stream})
    failed = events(answer.text)[-1]["response"] if stream else answer.json()
    assert failed["status"] == "failed"
    assert replies(explorer, "failed") == before + 1
    kept = kept_as(explorer, failed["id"])
    assert kept is not None
    assert kept.experiences[0].finish_reason is None


def test_what_must_not_be_stored_is_not(explorer: RunningExplorer, engines: list[RespondingDouble]) -> None:
    name = post(explorer, NATIVE | {"store": False}).json()["id"]
    assert kept_as(explorer, name) is None
    assert again(explorer, name).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_in_the_background_is_refused_before_an_engine_is_asked(
    explorer: RunningExplorer, engines: list[RespondingDouble], stream: bool
) -> None:
    reply = post(explorer, PLAIN | {"background": True, "stream": stream})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "background")
    assert "send the request without `background`" in reply.json()["error"]["message"]
    assert not any(each.native_requests or each.chats for each in engines)
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
    explorer: RunningExplorer, engines: list[RespondingDouble], more: Json, stream: bool
) -> None:
    reply = post(explorer, PLAIN | more | {"stream": stream})
    answer = events(reply.text)[-1]["response"] if stream else reply.json()
    found = again(explorer, answer["id"])
    assert found.status_code == 200
    differ = {key for key, value in found.json().items() if answer[key] != value}
    assert differ <= ({"max_output_tokens"} if stream else set())  # the double's streams begin without usage
    assert [each.native_requests for each in engines] == [[], []]
    assert again(explorer, answer["id"], "?stream=true").status_code == 400


def test_of_what_the_engine_answered_itself_the_words_are_told_again(
    explorer: RunningExplorer, engines: list[RespondingDouble]
) -> None:
    answer = post(explorer, NATIVE).json()
    found = again(explorer, answer["id"]).json()
    assert [item["content"][0]["text"] for item in found["output"]] == ["Done."]
    assert (found["id"], found["tools"], found["usage"]) == (answer["id"], answer["tools"], None)


@pytest.mark.parametrize("body", [PLAIN, NATIVE], ids=["translated", "native"])
@pytest.mark.parametrize(
    "field", [{"conversation": "conv_1"}, {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}]
)
def test_what_an_engine_would_leave_out_is_refused_and_not_recorded(
    explorer: RunningExplorer, engines: list[RespondingDouble], body: Json, field: Json
) -> None:
    before = len(explorer.exchanges())
    answer = post(explorer, body | field)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported", next(iter(field)))
    assert len(explorer.exchanges()) == before
    assert post(explorer, body | dict.fromkeys(field)).status_code == 200


def test_what_is_no_response_of_ours_is_not_found(explorer: RunningExplorer, engines: list[RespondingDouble]) -> None:
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


def continuing(explorer: RunningExplorer, engines: list[RespondingDouble], body: Json) -> Callable[[Json], Json]:
    name = post(explorer, body).json()["id"]
    for engine in engines:
        engine.native_requests.clear()
    return lambda more: post(explorer, more | {"previous_response_id": name}).json()


def test_a_response_goes_on_from_one_of_the_engine(explorer: RunningExplorer, engines: list[RespondingDouble]) -> None:
    answer = continuing(explorer, engines, NATIVE)(PLAIN | {"input": "and?"})
    assert answer["previous_response_id"]
    (chat,) = [each for engine in engines for each in engine.chats]
    message_item = [(each["role"], each["content"]) for each in chat.body["messages"]]
    assert message_item == [("user", "3+4="), ("assistant", "Done."), ("user", "and?")]


def test_a_response_of_the_engine_goes_on_from_one_of_ours(
    explorer: RunningExplorer, engines: list[RespondingDouble]
) -> None:
    received = [
        {"role": "user", "content": [{"type": "input_text", "text": "3+4="}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "shell", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "7"},
    ]
    go_on = continuing(explorer, engines, PLAIN | {"input": received, "instructions": "Be short."})
    answer = go_on(NATIVE | {"input": "and?", "instructions": "Be long."})
    request = native_requests(engines)
    assert "previous_response_id" not in request
    call = {"type": "function_call", "call_id": "c", "name": "shell", "arguments": '{"input": "ls"}'}
    assert request["input"][:4] == [
        *received[:2],
        call,
        {"type": "function_call_output", "call_id": "c", "output": "7"},
    ]
    assert [each["role"] for each in request["input"][4:]] == ["assistant", "user"]
    assert request["instructions"] == "Be long."
    assert answer["previous_response_id"]
    assert again(explorer, answer["id"]).json()["previous_response_id"] == answer["previous_response_id"]
