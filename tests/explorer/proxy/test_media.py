"""Files that clients name by URL, which an engine would fetch from inside the operator's network."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.doubles.engine import MODEL, EngineDouble, EnginePlace
from tests.explorer.running import RunningExplorer, explorer_running, settings_for
from tuneloop.explorer.engines.vllm import command
from tuneloop.explorer.proxy.media import check_media
from tuneloop.shared.errors import RequestRefused

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


def test_nor_for_the_other_endpoints(explorer: RunningExplorer) -> None:
    image = {"type": "image", "source": {"type": "url", "url": METADATA}}
    messages = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": [image]}]}
    part = {"type": "input_image", "image_url": METADATA}
    responses = {"model": MODEL, "input": [{"role": "user", "content": [part]}]}
    for path, body in (("/v1/messages", messages), ("/v1/responses", responses)):
        answer = explorer.http.post(path, json=body)
        assert answer.status_code == 400
        assert "allowed_media_domains" in answer.json()["error"]["message"]


def test_an_escape_hides_no_field(explorer: RunningExplorer) -> None:
    body = (
        f'{{"model":"{MODEL}","messages":[{{"role":"user","content":[{{"image\\u005furl":{{"url":"{METADATA}"}}}}]}}]}}'
    )
    answer = explorer.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.json()["error"]["code"] == "media_url_not_allowed"


def test_what_is_in_the_request_passes_and_what_a_tool_is_called_with() -> None:
    check_media(chat({"type": "image_url", "image_url": {"url": DATA}}), frozenset())
    call = {"function": {"name": "fetch", "arguments": f'{{"url": "{METADATA}"}}'}}
    check_media({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}, frozenset())
    check_media(chat({"type": "text", "text": METADATA, "url": METADATA}), frozenset())


def test_the_operator_names_hosts_and_engines_heed_them(tmp_path: Any) -> None:
    allowed = chat({"type": "image_url", "image_url": {"url": "https://cdn.shop.example/x.png"}})
    check_media(allowed, frozenset({"cdn.shop.example"}))
    for url in ("https://cdn.shop.example.evil/x", "https://evil/#cdn.shop.example", "https://cdn.shop.example@evil/"):
        with pytest.raises(RequestRefused):
            check_media(chat({"type": "image_url", "image_url": url}), frozenset({"cdn.shop.example"}))
    settings = settings_for(tmp_path, allowed_media_domains=["cdn.shop.example"])
    arguments = command(settings, model=tmp_path, socket=tmp_path / "s")
    assert arguments[arguments.index("--allowed-media-domains") + 1] == "cdn.shop.example"
