"""Every way of asking, through a running explorer, with the clients that people use."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.doubles.engine import CHAT, MODEL, EngineDouble, EnginePlace
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.shared.experience import Exchange, State

pytestmark = pytest.mark.contract

TEXT, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
PROMPT, WORDS, IDS = [18, 10, 19, 28], ["7", "!", ""], [22, 0, 1]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    TEXT: {"model": MODEL, "prompt": "3+4=", "max_tokens": 3},
    RESPONSES: {"model": MODEL, "input": "3+4=", "max_output_tokens": 12},
    MESSAGES: HELLO | {"max_tokens": 12},
}
PREFIX = {CHAT: "chatcmpl-", TEXT: "cmpl-", RESPONSES: "resp_", MESSAGES: "msg_"}


@dataclass
class Clever(EngineDouble):
    """A double that completes text too, and counts tokens; of text, the explorer asks only for what it proves."""

    text_request: Any = None
    passed: Any = None
    passed_status: int = 200
    answer_to_passed: bytes = b'{"count":2,"tokens":[64,65]}'

    async def _answer(self, scope: Any, body: bytes, send: Any) -> None:
        path = scope["path"]
        if path == TEXT and (request := json.loads(body)).get("top_k") != 1:
            return await self._text(request, scope, send)
        if path in ("/tokenize", "/detokenize", COUNT) or (path == "/v1/models" and self.passed_status != 200):
            self.passed = path, body
            return await tell(send, self.passed_status, self.answer_to_passed)
        await super()._answer(scope, body, send)

    async def _text(self, request: dict[str, Any], scope: Any, send: Any) -> None:
        self.text_request = request
        name = "cmpl-" + dict(scope["headers"])[b"x-request-id"].decode()
        if not request.get("stream"):
            return await tell(send, 200, json.dumps(completed(name, range(3), request)).encode())
        pieces = [completed(name, [at], request) for at in range(3)]
        reply = b"".join(b"data: %b\n\n" % json.dumps(each, separators=(",", ":")).encode() for each in pieces)
        await tell(send, 200, reply + b"data: [DONE]\n\n", b"text/event-stream")


def completed(name: str, which: Any, request: dict[str, Any]) -> dict[str, Any]:
    """A completion of text, or a piece of one, as vLLM tells it."""
    choice: dict[str, Any] = {"index": 0, "text": "".join(WORDS[at] for at in which), "logprobs": None}
    choice["finish_reason"] = "length" if 2 in which else None
    if request.get("logprobs") is not None:
        choice["logprobs"] = {"token_logprobs": [-0.5] * len(which), "tokens": [WORDS[at] for at in which]}
    if request.get("return_token_ids"):
        choice |= {"token_ids": [IDS[at] for at in which], "prompt_token_ids": PROMPT if 0 in which else None}
    return {"id": name, "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}


async def tell(send: Any, status: int, body: bytes, kind: bytes = b"application/json") -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def place(places: list[EnginePlace]) -> EnginePlace:
    places[0].double = Clever(url=places[0].url)
    return places[0]


@pytest.fixture(scope="module")
def explorer(place: EnginePlace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExplorer]:
    """One explorer for all tests here."""
    folder: Path = tmp_path_factory.mktemp("dialects")
    with explorer_running(settings_for(folder, [place.url])) as running:
        yield running


@pytest.fixture
def engine(place: EnginePlace, explorer: RunningExplorer) -> Clever:
    # The same life of it: an engine that was started anew is given its weights first.
    place.double = Clever(url=place.url, began_at=place.double.began_at)
    return place.double


def kept_as(explorer: RunningExplorer, msg_id: str) -> Exchange:
    (found,) = [each for each in explorer.exchanges() if each.msg_id == msg_id]
    return found


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    return [json.loads(line) for line in lines]


def name_of(events: list[dict[str, Any]]) -> str:
    first = events[0]
    name: str = first.get("id") or first.get("response", first.get("message"))["id"]
    return name


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
def test_every_way_of_asking_is_kept_whole_and_takes_feedback(
    explorer: RunningExplorer, engine: Clever, path: str, stream: bool
) -> None:
    body = ASKED[path] | {"stream": stream, "metadata": {"user_id": "u"}}
    reply = explorer.http.post(path, json=body)
    assert reply.status_code == 200
    name = name_of(events(reply.text)) if stream else reply.json()["id"]
    assert name.startswith(PREFIX[path])
    kept = kept_as(explorer, name)
    assert (kept.endpoint, json.loads(kept.request)) == (path, body)
    (experience,) = kept.experiences
    assert experience.drop_reason is None
    assert experience.prompt_ids
    assert len(experience.logprobs) == len(experience.completion_ids) == 4 * (3 if path == TEXT else 12)
    assert "token_ids" not in reply.text.replace('token_ids":null', "")
    assert explorer.feedback(name).status_code == 200
    eventually(lambda: explorer.ledger.reports.counts()[State.REWARDED] > 0)
    assert explorer.http.post(path, json=body | {"store": False}).status_code == 200
    eventually(lambda: explorer.services.proxy.admission.in_flight == 0)


def test_the_openai_client_completes_text(explorer: RunningExplorer, engine: Clever) -> None:
    with explorer.openai() as client:
        whole = client.completions.create(**ASKED[TEXT])
        stream = list(client.completions.create(**ASKED[TEXT], stream=True))
        request = client.completions.create(**ASKED[TEXT], logprobs=1)
    assert whole.choices[0].text == "".join(piece.choices[0].text for piece in stream) == "7!"
    assert whole.choices[0].logprobs is None
    assert request.choices[0].logprobs is not None
    assert (engine.text_request["logprobs"], engine.text_request["return_token_ids"]) == (1, True)


def test_the_openai_client_goes_on_from_a_response(explorer: RunningExplorer, engine: Clever) -> None:
    with explorer.openai() as client:
        first = client.responses.create(**ASKED[RESPONSES])
        second = client.responses.create(model=MODEL, input="and?", previous_response_id=first.id)
        with client.responses.stream(model=MODEL, input="more?", previous_response_id=second.id) as stream:
            third = stream.until_done().get_final_response()
    reply = [(each["role"], each["content"]) for each in engine.chats[-1].body["messages"]]
    assert reply == [
        ("user", "3+4="),
        ("assistant", first.output_text),
        ("user", "and?"),
        ("assistant", second.output_text),
        ("user", "more?"),
    ]
    assert third.previous_response_id == second.id
    assert third.output_text == first.output_text


def test_while_the_database_is_away_a_response_is_not_said_to_be_unknown(
    explorer: RunningExplorer, engine: Clever
) -> None:
    explorer.ledger.recording.away = True
    first = explorer.http.post(RESPONSES, json=ASKED[RESPONSES]).json()["id"]
    continued = ASKED[RESPONSES] | {"previous_response_id": first}
    reply = explorer.http.post(RESPONSES, json=continued)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "database_unavailable")
    assert "retry-after" in reply.headers
    explorer.ledger.recording.away = False
    eventually(lambda: explorer.http.post(RESPONSES, json=continued).status_code == 200)


def test_what_was_never_said_cannot_be_gone_on_from(explorer: RunningExplorer, engine: Clever) -> None:
    forgotten = explorer.http.post(RESPONSES, json=ASKED[RESPONSES] | {"store": False}).json()["id"]
    chat = explorer.chat().json()["id"]
    for name in ("resp_x", "", "\0", forgotten, forgotten + ":0", "resp_" + chat.removeprefix("chatcmpl-")):
        reply = explorer.http.post(RESPONSES, json=ASKED[RESPONSES] | {"previous_response_id": name})
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, "previous_response_id")
    for name in (5, [], {}, True):
        reply = explorer.http.post(RESPONSES, json=ASKED[RESPONSES] | {"previous_response_id": name})
        assert reply.status_code == 400
    with explorer.openai() as client, pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_x")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", COUNT])
def test_what_samples_nothing_is_passed_on_and_not_kept(explorer: RunningExplorer, engine: Clever, path: str) -> None:
    before = len(explorer.exchanges())
    reply = explorer.http.post(path, content=b'{"model":"t", "prompt": "ab"}')
    assert (reply.status_code, reply.content) == (200, engine.answer_to_passed)
    assert engine.passed == (path, b'{"model":"t", "prompt": "ab"}')
    assert reply.headers["x-request-id"]
    assert len(explorer.exchanges()) == before
    assert explorer.http.get(path).status_code == 405


REFUSED = b'{"error":{"message":"The model `nope` does not exist.","type":"NotFoundError","param":"model","code":404}}'


@pytest.mark.parametrize("path", ["/tokenize", COUNT, "/v1/models"])
@pytest.mark.parametrize(
    ("status", "body", "answer"),
    [
        (404, REFUSED, 404),
        (404, b'{"detail":"Not Found"}', 404),
        (500, b"Internal Server Error", 500),
        (503, b"", 503),
        (302, b"", 502),
        (204, b"", 502),
    ],
)
def test_what_the_engine_refuses_is_told_in_an_envelope(
    explorer: RunningExplorer, engine: Clever, path: str, status: int, body: bytes, answer: int
) -> None:
    engine.passed_status, engine.answer_to_passed = status, body
    asked = ("GET", path, None) if "models" in path else ("POST", path, {"model": "t", "prompt": "ab"})
    reply = explorer.http.request(*asked[:2], json=asked[2])
    assert reply.status_code == answer
    assert reply.content == body if body == REFUSED else reply.json()["error"]["message"]
    if path == COUNT and body != REFUSED:
        assert reply.json()["type"] == "error"
    engine.passed_status = 200
    eventually(lambda: explorer.services.fleet.engines[0].in_flight == 0)


def test_models_are_listed_and_found_by_name(explorer: RunningExplorer, engine: Clever) -> None:
    with explorer.openai() as client:
        (listed,) = client.models.list()
        assert client.models.retrieve(listed.id) == listed
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("no/such model")
    engine.passed_status = 201
    for reply in (b"[]", b"{}", b'{"data": 5}', b'{"data": [5]}', b"nonsense"):
        engine.answer_to_passed = reply
        assert explorer.http.get("/v1/models/x").status_code == 502


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/messages/batches", "/v1/completions/x", "/pause", "/v1/chat"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_routes_are_not_found(explorer: RunningExplorer, method: str, path: str) -> None:
    reply = explorer.http.request(method, path)
    assert reply.status_code == 404
    assert (reply.json().get("type") == "error") == path.startswith(MESSAGES)
    assert path in reply.json()["error"]["message"]


NONSENSE = [
    b"[]",
    b"{}",
    b'{"choices": []}',
    b'{"choices": [{"index": 0}]}',
    b'{"choices": [{"index": 0, "message": null}]}',
    b'{"choices": [{"index": 0, "message": {}, "delta": {}, "finish_reason": "stop"}]}',
    b'{"choices": [{"index": 0, "message": {"content": [1]}, "finish_reason": "stop"}]}',
    b'{"choices": [{"index": 0, "message": {"tool_calls": [{}]}, "delta": {"tool_calls": [{}]}}]}',
    b'{"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "new"}], "usage": 5}',
    b'{"error": {"message": "died", "code": 500}}',
]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("reply", NONSENSE)
def test_whatever_the_engine_says_is_no_bug_of_ours(
    explorer: RunningExplorer, engine: Clever, path: str, reply: bytes
) -> None:
    engine.answer = reply
    whole = explorer.http.post(path, json=ASKED[path])
    assert whole.status_code in {200, 502}, whole.text
    engine.answer = b"data: %b\n\ndata: [DONE]\n\n" % reply
    assert explorer.http.post(path, json=ASKED[path] | {"stream": True}).status_code == 200
    eventually(lambda: explorer.services.proxy.admission.in_flight == 0)
    engine.answer = None
    assert isinstance(explorer.http.post(path, json=ASKED[path]), httpx.Response)
