"""Files that clients name by URL, which an engine would fetch from inside the operator's network."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import MODEL, EngineDouble, EnginePlace
from tests.explorer.running import RunningExplorer, explorer_running, settings_for
from tuneloop.explorer.engines.vllm import command
from tuneloop.explorer.proxy.media import refuse_remote_files, with_own_uuids

METADATA = "http://169.254.169.254/latest/meta-data"
DATA = "data:image/png;base64,aGk="


@pytest.fixture(scope="module")
def engine(places: list[EnginePlace]) -> EngineDouble:
    return places[0].fresh()


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory, engine: EngineDouble) -> Iterator[RunningExplorer]:
    with explorer_running(settings_for(tmp_path_factory.mktemp("media"), [engine.url])) as running:
        yield running


def chat(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}


@pytest.mark.parametrize("url", [METADATA, "file:///etc/passwd", "ftp://x/y", "//x/y", "HTTP://X/", " http://x/"])
@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
def test_no_url_is_fetched_for_a_chat(explorer: RunningExplorer, url: str, kind: str) -> None:
    answer = explorer.http.post(
        "/v1/chat/completions", json={"model": MODEL, **chat({"type": kind, kind: {"url": url}})}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "media_url_not_allowed")


def test_no_document_is_fetched_for_a_chat(explorer: RunningExplorer) -> None:
    document = {"type": "document", "source": {"type": "url", "url": METADATA}}
    answer = explorer.http.post("/v1/chat/completions", json={"model": MODEL, **chat(document)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "media_url_not_allowed")


def test_nor_for_the_other_endpoints(explorer: RunningExplorer) -> None:
    image = {"type": "image", "source": {"type": "url", "url": METADATA}}
    messages = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": [image]}]}
    part = {"type": "input_image", "image_url": METADATA}
    responses = {"model": MODEL, "input": [{"role": "user", "content": [part]}]}
    for path, body in (("/v1/messages", messages), ("/v1/responses", responses)):
        answer = explorer.http.post(path, json=body)
        assert answer.status_code == 400
        assert "send them as `data:` URLs" in answer.text


def test_an_escape_hides_no_field(explorer: RunningExplorer) -> None:
    body = (
        f'{{"model":"{MODEL}","messages":[{{"role":"user","content":[{{"image\\u005furl":{{"url":"{METADATA}"}}}}]}}]}}'
    )
    answer = explorer.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.json()["error"]["code"] == "media_url_not_allowed"


def test_what_is_in_the_request_passes_and_what_a_tool_is_called_with() -> None:
    refuse_remote_files(chat({"type": "image_url", "image_url": {"url": DATA}}))
    call = {"function": {"name": "fetch", "arguments": f'{{"url": "{METADATA}"}}'}}
    refuse_remote_files({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
    refuse_remote_files(chat({"type": "text", "text": METADATA, "url": METADATA}))
    use = {"type": "tool_use", "input": {"image_url": METADATA, "source": {"url": METADATA}}}
    refuse_remote_files(chat(use))


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_no_url_is_fetched_to_count_tokens(explorer: RunningExplorer, engine: EngineDouble, path: str) -> None:
    image = {"type": "image", "source": {"type": "url", "url": METADATA}}
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": METADATA}},
        image,
        {"type": "tool_result", "content": [image]},
    ]
    asked = len(engine.passed)
    for part in parts:
        answer = explorer.http.post(path, json={"model": MODEL, **chat(part)})
        assert answer.status_code == 400
        assert "not fetched from URLs" in answer.text
    assert len(engine.passed) == asked


def uuids(body: bytes | dict[str, Any], field: str = "messages") -> list[Any]:
    turns = (body if isinstance(body, dict) else json.loads(body))[field]
    return [part.get("uuid") for turn in turns for part in turn["content"]]


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('"uuid":"invoice-1"', "default:invoice-1"),
        ('"\\u0075uid":"invoice-1"', "default:invoice-1"),
        ('"uuid":""', "default:"),
        ('"uuid":7', "default:7"),
        ('"uuid":null', None),
    ],
)
def test_what_an_engine_keeps_under_a_name_is_kept_for_its_tenant(
    explorer: RunningExplorer, engine: EngineDouble, written: str, sent: str | None
) -> None:
    part = f'{{"type":"image_url","image_url":null,{written}}}'
    body = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":[{{"type":"text","text":"a"}},{part}]}}]}}'
    for path in ("/v1/chat/completions", "/tokenize", "/v1/messages/count_tokens"):
        answer = explorer.http.post(path, content=body, headers={"Content-Type": "application/json"})
        arrived = engine.chats[-1].body if path == "/v1/chat/completions" else engine.passed[-1][1]
        assert uuids(arrived) == [None, sent], path
        if path == "/v1/chat/completions":
            assert answer.status_code == 200
            [kept] = [each for each in explorer.exchanges() if each.msg_id == answer.json()["id"]]
            assert kept.request == body.encode()


def test_tenants_share_no_name_and_what_has_none_is_left_as_it_is() -> None:
    image = {"type": "image_url", "image_url": {"url": DATA}, "uuid": "x"}
    for holder, place in (("messages", "content"), ("input", "content"), ("input", "output")):
        body = {holder: [{"role": "user", place: [image, "words"]}, "words"], "uuid": "mine"}
        assert with_own_uuids(body, "acme") == {
            holder: [{"role": "user", place: [{**image, "uuid": "acme:x"}, "words"]}, "words"],
            "uuid": "mine",
        }
    for unnamed in (chat({"type": "text", "text": "uuid"}), {"prompt": "uuid", "uuid": "x"}, {"messages": "uuid"}):
        assert with_own_uuids(unnamed, "acme") is unnamed


def test_an_engine_is_told_to_fetch_nothing(tmp_path: Path) -> None:
    """Without a domain vLLM fetches from everywhere, also for a route of its own that nobody has thought of."""
    arguments = command(settings_for(tmp_path), model=tmp_path, socket=tmp_path / "s")
    assert arguments[arguments.index("--allowed-media-domains") + 1] == "none.invalid"


def test_a_chat_template_of_a_clients_is_run_nowhere(explorer: RunningExplorer, engine: EngineDouble) -> None:
    text = {"model": MODEL, "max_tokens": 9}
    bodies = {
        "/v1/chat/completions": {**text, "messages": [{"role": "user", "content": "a"}]},
        "/v1/messages": {**text, "messages": [{"role": "user", "content": "a"}]},
        "/v1/completions": {**text, "prompt": "a"},
        "/v1/responses": {"model": MODEL, "input": "a"},
        "/tokenize": {**text, "messages": [{"role": "user", "content": "a"}]},
        "/v1/messages/count_tokens": {**text, "messages": [{"role": "user", "content": "a"}]},
    }
    asked = len(engine.chats), len(engine.passed)
    for path, body in bodies.items():
        for brought in ({"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}):
            answer = explorer.http.post(path, json=body | brought)
            assert answer.status_code == 400, (path, brought, answer.text)
    assert (len(engine.chats), len(engine.passed)) == asked
    switched = bodies["/v1/chat/completions"] | {
        "chat_template": None,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert explorer.http.post("/v1/chat/completions", json=switched).status_code == 200
