import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.doubles.engine import CHAT, MODEL, EngineDouble, recorded
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.wire import Wire, http_request
from tuneloop.shared.experience import Exchange, State

pytestmark = pytest.mark.contract

TOOLS = {
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
}
ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 2},
    {"extra_body": {"return_token_ids": True}},
    TOOLS,
]


def without_id(reply: dict[str, Any]) -> dict[str, Any]:
    """What must be equal: random ids and the clock aside."""
    for choice in reply["choices"]:
        for call in choice.get("message", choice.get("delta", {})).get("tool_calls") or ():
            call.pop("id", None)
    return {key: value for key, value in reply.items() if key not in {"id", "created"}}


def text_of(reply: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for piece in [reply] for choice in piece["choices"])


def only(explorer: RunningExplorer) -> Exchange:
    (found,) = explorer.exchanges()
    return found


@pytest.mark.parametrize("fields", ASKED)
def test_the_openai_client_gets_the_engines_reply(
    explorer: RunningExplorer, double: EngineDouble, fields: dict[str, Any]
) -> None:
    with explorer.openai() as ours, openai.OpenAI(base_url=f"{double.url}/v1", api_key="x") as direct:
        reply = ours.chat.completions.create(**HELLO, **fields)
        plain = direct.chat.completions.create(**HELLO, **fields)
    assert without_id(reply.to_dict()) == without_id(plain.to_dict())
    assert only(explorer).msg_id == reply.id


@pytest.mark.parametrize("fields", ASKED)
def test_the_openai_client_gets_the_engines_stream(
    explorer: RunningExplorer, double: EngineDouble, fields: dict[str, Any]
) -> None:
    with explorer.openai() as ours, openai.OpenAI(base_url=f"{double.url}/v1", api_key="x") as direct:
        replies = [
            [without_id(piece.to_dict()) for piece in client.chat.completions.create(**HELLO, **fields, stream=True)]
            for client in (ours, direct)
        ]
    assert "".join(map(text_of, replies[0])) == "".join(map(text_of, replies[1]))
    assert replies[0][0].keys() == replies[1][0].keys()
    if not fields:
        assert replies[0] == replies[1]
    assert not only(explorer).experiences[0].unsampled or "tools" in fields


@pytest.mark.parametrize(("level", "why"), [("auto", None), ("parameter", "sampling:tools")])
def test_calls_that_the_engines_own_arguments_hold_to_a_grammar_are_marked(
    running_explorer: Run, double: EngineDouble, level: str, why: str | None
) -> None:
    rollout = {"engine_urls": [double.url], "dtype": "float32", "engine_args": ["--tool-strict-level", level]}
    explorer = running_explorer(double, rollout_model=rollout)
    with explorer.openai() as client:
        client.chat.completions.create(**HELLO, tools=TOOLS["tools"])
    assert only(explorer).experiences[0].unsampled == why


async def test_the_async_client_gets_the_same(explorer: RunningExplorer, double: EngineDouble) -> None:
    plain = json.loads(recorded("whole_plain.json"))
    async with explorer.openai_async() as client:
        whole = await client.chat.completions.create(**HELLO)
        usage = {"include_usage": True}
        stream = await client.chat.completions.create(**HELLO, stream=True, stream_options=usage)
        streamed = [piece.to_dict() async for piece in stream]
    assert without_id(whole.to_dict()) == without_id(plain)
    assert "".join(map(text_of, streamed)) == plain["choices"][0]["message"]["content"]
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"]["completion_tokens"] == 12
    first, second = explorer.exchanges()
    assert first.experiences == second.experiences


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_is_kept(explorer: RunningExplorer, stream: bool) -> None:
    with explorer.openai() as client:
        reply = client.chat.completions.create(**HELLO, n=2, stream=stream)
        if stream:
            assert {choice.index for piece in reply for choice in piece.choices} == {0, 1}
    assert [each.choice for each in only(explorer).experiences] == [0, 1]
    assert explorer.counts()[State.RECORDED] == 2


def test_the_experience_is_on_disk_before_the_stream_ends(explorer: RunningExplorer) -> None:
    with explorer.http.stream("POST", CHAT, json=HELLO | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                assert len(explorer.exchanges()) == 1


def test_a_hundred_streams_are_a_hundred_experiences(explorer: RunningExplorer) -> None:
    ids = []
    with explorer.openai() as client:
        for _ in range(100):
            ids.append([piece.id for piece in client.chat.completions.create(**HELLO, stream=True)][-1])
            # Right at the end of the stream, and only once.
            assert explorer.feedback(ids[-1]).status_code == 200
    assert [each.msg_id for each in explorer.exchanges()] == ids
    assert explorer.counts()[State.REWARDED] == 100


def test_the_engine_is_asked_for_what_we_keep_and_told_nothing_of_the_client(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    metadata = {"task_id": "t1", "run_id": 7}
    headers = {"Authorization": "Bearer secret", "X-Request-Id": "order-1001", "X-Other": "x"}
    request = HELLO | {"metadata": metadata, "store": True, "user": "me"}
    reply = explorer.http.post(CHAT, json=request, headers=headers)
    (received,) = double.chats
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert received.body == neutral | HELLO | {"user": "me", "logprobs": True, "return_token_ids": True}
    assert "authorization" not in received.headers
    assert "x-other" not in received.headers
    assert received.headers["x-request-id"] == reply.json()["id"].removeprefix("chatcmpl-")
    assert reply.headers["x-request-id"] == "order-1001"
    assert "order-1001" not in reply.text
    kept = only(explorer)
    assert (kept.task_id, kept.run_id) == ("t1", "7")
    assert json.loads(kept.request) == request


def test_two_clients_with_one_request_id_get_two_ids(explorer: RunningExplorer) -> None:
    replies = [explorer.http.post(CHAT, json=HELLO, headers={"x-request-id": "same"}) for _ in range(2)]
    assert len({reply.json()["id"] for reply in replies}) == 2


def test_every_reply_says_which_version_answered(explorer: RunningExplorer) -> None:
    assert explorer.chat().headers["x-tuneloop-version"] == "0"
    assert explorer.chat(stream=True).headers["x-tuneloop-version"] == "0"
    assert explorer.chat(model="nope").headers["x-tuneloop-version"] == "0"
    reply = explorer.chat()
    assert reply.headers["x-request-id"] == reply.json()["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_need_not_be_stored_is_not(explorer: RunningExplorer, stream: bool) -> None:
    assert explorer.chat(store=False, stream=stream).status_code == 200
    assert explorer.exchanges() == []


@pytest.mark.parametrize("train", [False, "false"])
def test_what_must_not_be_trained_on_is_kept_with_the_reason(explorer: RunningExplorer, train: object) -> None:
    assert explorer.chat(metadata={"train": train}).status_code == 200
    assert only(explorer).experiences[0].drop_reason == "opt_out"
    assert explorer.counts()[State.DROPPED] == 1


def test_how_a_reply_was_sampled_is_kept(explorer: RunningExplorer) -> None:
    explorer.chat(temperature=0.5)
    explorer.chat(top_p=0.5)
    first, second = (each.experiences[0] for each in explorer.exchanges())
    assert (first.temperature, first.drop_reason, first.unsampled) == (0.5, None, None)
    assert (second.drop_reason, second.unsampled) == (None, "sampling:top_p")
    assert explorer.counts()[State.RECORDED] == 2


def test_a_client_that_leaves_a_stream_stops_the_engine(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.piece_pause_s = 0.05
    with explorer.http.stream("POST", CHAT, json=HELLO | {"stream": True, "logprobs": True}) as reply:
        lines = reply.iter_lines()
        for _ in range(5):
            next(lines)
    eventually(lambda: double.left == 1)
    eventually(lambda: len(explorer.exchanges()) == 1)
    (kept,) = only(explorer).experiences
    assert kept.drop_reason == "cut_off"
    assert 0 < len(kept.completion_ids) // 4 < 12
    assert explorer.counts()[State.DROPPED] == 1


def test_a_client_that_leaves_a_whole_reply_stops_the_engine(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.hangs = True
    with Wire(explorer.url) as wire:
        wire.send(http_request())
        eventually(lambda: len(double.chats) == 1)
    eventually(lambda: double.left == 1)
    eventually(lambda: explorer.services.fleet.engines[0].in_flight == 0)
    assert explorer.exchanges() == []


@pytest.mark.parametrize("cut", range(0, 12, 3))
@pytest.mark.parametrize("how", ["cut_after", "end_after"])
def test_a_stream_that_breaks_ends_with_an_error(
    explorer: RunningExplorer, double: EngineDouble, how: str, cut: int
) -> None:
    double.piece_pause_s = 0.005  # what a lost connection still holds is lost with it
    setattr(double, how, cut)
    body = explorer.chat(stream=True).text
    assert "[DONE]" not in body
    assert json.loads(body.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == "engine_error"
    assert all(each.experiences[0].drop_reason == "cut_off" for each in explorer.exchanges())
    assert len(explorer.exchanges()) == (1 if cut else 0)
    with explorer.openai() as client, pytest.raises(openai.APIError, match="broke off"):
        list(client.chat.completions.create(**HELLO, stream=True))


@pytest.mark.parametrize(
    "piece", [b"[]", b"5", b'"error"', b"{", b'{"choices": [{}]}', b'{"choices": 5}', b'{"choices": [{"index": 0}]}']
)
def test_a_stream_of_nonsense_is_cut_off(explorer: RunningExplorer, double: EngineDouble, piece: bytes) -> None:
    double.answer = b"data: " + piece + b"\n\n"
    body = explorer.chat(stream=True).text
    assert "[DONE]" not in body
    assert '"code":"engine_error"' in body
    assert all(each.experiences[0].drop_reason == "cut_off" for each in explorer.exchanges())


def refused(reply: httpx.Response, status: int, code: str | None) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code)
    assert "Traceback" not in reply.text
    assert ".py" not in reply.text
    return error


def test_what_the_engine_refuses_comes_back_as_it_said_it(explorer: RunningExplorer) -> None:
    listed = recorded("error_model.json").replace(b"Valid aliases: t.", b"GET /v1/models lists those that do.")
    for stream in (False, True):
        reply = explorer.chat(model="nope", stream=stream)
        assert (reply.status_code, reply.content) == (404, listed)
        assert explorer.chat(messages=[], stream=stream).content == recorded("error_nomsg.json")
    with explorer.openai() as client, pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="nope", messages=HELLO["messages"])
    assert explorer.exchanges() == []


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/tokenize"]
)
def test_a_key_in_the_place_of_the_model_is_not_repeated(
    explorer: RunningExplorer, double: EngineDouble, path: str
) -> None:
    body = HELLO | {"input": "ab", "prompt": "ab", "max_tokens": 4}
    seen = len(double.chats) + len(double.passed)
    for key in ("tl-" + "aB3_-" * 9, "sk-proj-abcdefgh12345678"):
        refused = explorer.http.post(path, json=body | {"model": key})
        listed = explorer.http.get(f"/v1/models/{key}")
        assert (refused.status_code, listed.status_code) == (404, 404)
        assert key not in refused.text + listed.text
    for wrong in ([], {}, 1, True):
        refused = explorer.http.post(path, json=body | {"model": wrong})
        assert (refused.status_code, "model must be a string" in refused.text) == (400, True)
    assert len(double.chats) + len(double.passed) == seen, "no engine got those"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_quotes_nothing_that_the_client_never_said(
    explorer: RunningExplorer, double: EngineDouble, stream: bool
) -> None:
    double.quotes = lambda request: True
    request = json.dumps(HELLO | {"stream": stream})
    quoted = explorer.http.post(CHAT, content=request).json()["error"]["message"]
    assert quoted == f"1 error: 'input': {request}"
    assert explorer.chat(model="nope").status_code == 404
    assert explorer.exchanges() == []


def test_an_engine_is_not_told_of_labels_when_a_refusal_is_fetched_again(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.quotes = lambda request: True
    explorer.chat(metadata={"task_id": "ours"}, store=True)
    first, again = (each.body for each in double.chats)
    assert "return_token_ids" in first
    assert again == HELLO


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_a_refusal_that_cannot_be_fetched_again_is_the_first_one(
    explorer: RunningExplorer, double: EngineDouble, how: str
) -> None:
    def quotes(request: dict[str, Any]) -> bool:
        if how == "dies" and "return_token_ids" not in request:
            raise ConnectionAbortedError
        return "return_token_ids" in request

    double.quotes, double.hangs = quotes, how == "hangs"
    reply = explorer.chat()
    assert reply.status_code == 400
    assert "return_token_ids" in reply.json()["error"]["message"]


def test_an_engine_that_fails_is_not_asked_again_for_its_words(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.status, double.answer = 500, b'{"error": {"message": "logprobs, return_token_ids"}}'
    assert explorer.chat().status_code == 500
    assert len(double.chats) == 1


def test_what_is_refused_only_for_what_we_ask_is_refused(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.quotes = lambda request: "return_token_ids" in request
    for stream in (False, True):
        assert "return_token_ids" in explorer.chat(stream=stream).json()["error"]["message"]
    eventually(lambda: not any(engine.in_flight for engine in explorer.services.fleet.engines))
    assert explorer.exchanges() == []


@pytest.mark.parametrize("answer", [None, b"<html>", b"[]", b'{"error": "no"}', b""])
def test_an_engine_that_fails_is_said_so(explorer: RunningExplorer, double: EngineDouble, answer: bytes | None) -> None:
    double.status, double.answer = 500, answer
    reply = explorer.chat()
    assert reply.status_code == 500
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize("answer", [b"not JSON", b"[]", b"5", b"null", b'{"choices": [{}]}', b'{"choices": 5}'])
def test_a_reply_that_cannot_be_read_is_502(explorer: RunningExplorer, double: EngineDouble, answer: bytes) -> None:
    double.answer = answer
    refused(explorer.chat(), 502, "engine_error")
    assert explorer.exchanges() == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_the_engine_closed_meanwhile_costs_no_reply(
    explorer: RunningExplorer, double: EngineDouble, stream: bool
) -> None:
    assert explorer.chat(stream=stream).status_code == 200
    double.resets_next = 1
    assert explorer.chat(stream=stream).status_code == 200
    assert double.resets_next == 0


def test_a_whole_reply_that_breaks_is_502(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.cut_after = 0
    refused(explorer.chat(), 502, "engine_error")
    double.cut_after, double.resets = None, True
    refused(explorer.chat(), 502, "engine_error")
    refused(explorer.http.get("/v1/models"), 502, "engine_error")


def test_an_engine_that_hangs_is_504(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, request_timeout=2)
    double.hangs = True
    refused(explorer.chat(), 504, "engine_timeout")
    refused(explorer.chat(stream=True), 504, "engine_timeout")
    double.hangs, double.piece_pause_s = False, 0.7
    assert '"code":"engine_timeout"' in explorer.chat(stream=True).text
    assert explorer.exchanges()[0].experiences[0].drop_reason == "cut_off"


def test_an_engine_that_is_gone_is_502_and_then_503(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.dead = True
    refused(explorer.chat(), 502, "engine_error")
    eventually(lambda: explorer.http.get("/health/ready").status_code == 503)
    error = explorer.chat()
    refused(error, 503, "engine_unavailable")
    assert error.headers["retry-after"] == "2"
    double.dead = False
    eventually(lambda: explorer.chat().status_code == 200)


def test_replies_that_cannot_be_trained_on_still_pass(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.no_token_ids = True
    assert explorer.chat().json()["choices"][0]["message"]["content"]
    assert explorer.chat(stream=True).text.endswith("[DONE]\n\n")
    double.no_token_ids, empty = False, json.loads(recorded("whole_captured.json"))
    empty["choices"][0] |= {"token_ids": [], "logprobs": None, "finish_reason": "stop", "message": {"content": ""}}
    double.answer = json.dumps(empty).encode()
    assert explorer.chat().status_code == 200
    reasons = [each.experiences[0].drop_reason for each in explorer.exchanges()]
    assert reasons == ["no_token_ids", "no_token_ids", "empty"]


def test_models_are_the_engines(explorer: RunningExplorer) -> None:
    assert explorer.http.get("/v1/models").content == recorded("models.json")
    with explorer.openai() as client:
        assert [each.id for each in client.models.list()] == [MODEL]


def test_the_least_busy_engine_answers(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    explorer = running_explorer(*doubles, prefix_affinity=False)
    eventually(lambda: all(each.state == "ready" for each in explorer.services.fleet.engines))
    for double in doubles:
        double.piece_pause_s = 0.3
    asking = [threading.Thread(target=explorer.chat) for _ in range(4)]
    for each in asking:
        each.start()
    eventually(lambda: len(doubles[0].chats) == len(doubles[1].chats) == 2)
    for each in asking:
        each.join()


async def test_many_streams_at_once_are_all_kept(explorer: RunningExplorer) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(**HELLO, stream=True)
        return [piece.id async for piece in stream][-1]

    async with explorer.openai_async() as client:
        ids = await asyncio.gather(*(one(client) for _ in range(64)))
    assert {each.msg_id for each in explorer.exchanges()} == set(ids)
    assert len(set(ids)) == 64


@pytest.mark.contract
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_reasoning_of_a_history_reaches_the_engine_under_the_name_it_has(
    explorer: RunningExplorer, double: EngineDouble, name: str, stream: bool
) -> None:
    """vLLM from 0.26 on takes both for the same."""
    history = [
        *HELLO["messages"],
        {"role": "assistant", "content": "7", name: "3+4 is 7"},
        {"role": "user", "content": "?"},
    ]
    assert explorer.chat(messages=history, stream=stream).status_code == 200
    assert double.chats[-1].body["messages"] == history
