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


async def test_what_is_in_the_request_passes_and_what_a_tool_is_called_with() -> None:
    await check_media(chat({"type": "image_url", "image_url": {"url": DATA}}), frozenset())
    call = {"function": {"name": "fetch", "arguments": f'{{"url": "{METADATA}"}}'}}
    await check_media({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}, frozenset())
    await check_media(chat({"type": "text", "text": METADATA, "url": METADATA}), frozenset())


async def public(host: str) -> list[str]:
    return ["93.184.216.34", "2606:2800:220:1::1"]


async def test_the_operator_names_hosts_and_engines_heed_them(tmp_path: Any) -> None:
    allowed = chat({"type": "image_url", "image_url": {"url": "https://cdn.shop.example/x.png"}})
    await check_media(allowed, frozenset({"cdn.shop.example"}), look_up=public)
    for url in ("https://cdn.shop.example.evil/x", "https://evil/#cdn.shop.example", "https://cdn.shop.example@evil/"):
        with pytest.raises(RequestRefused):
            await check_media(
                chat({"type": "image_url", "image_url": url}), frozenset({"cdn.shop.example"}), look_up=public
            )
    settings = settings_for(tmp_path, allowed_media_domains=["cdn.shop.example"])
    arguments = command(settings, model=tmp_path, socket=tmp_path / "s")
    assert arguments[arguments.index("--allowed-media-domains") + 1] == "cdn.shop.example"


INSIDE = (
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "2002:a00:1::", "::"),
)


@pytest.mark.parametrize("address", INSIDE)
async def test_a_name_that_stands_for_an_address_inside_is_refused(address: str) -> None:
    """Whoever has the name in the DNS decides what it stands for."""

    async def look_up(host: str) -> list[str]:
        return ["93.184.216.34", address]

    named = chat({"type": "image_url", "image_url": {"url": "https://cdn.shop.example/x.png"}})
    with pytest.raises(RequestRefused, match="private network"):
        await check_media(named, frozenset({"cdn.shop.example"}), look_up=look_up)


async def test_a_name_that_nobody_knows_is_refused() -> None:
    named = chat({"type": "image_url", "image_url": {"url": "https://no-such-host.invalid/x.png"}})
    with pytest.raises(RequestRefused, match="private network"):
        await check_media(named, frozenset({"no-such-host.invalid"}))


async def test_an_address_that_the_operator_names_is_what_he_wants() -> None:
    named = chat({"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}})
    await check_media(named, frozenset({"10.0.0.1"}))


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
