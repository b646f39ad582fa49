"""What proxies and load balancers need of event streams: no buffering, and no silence."""

import itertools
import threading
from collections.abc import Iterable
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.engine import CHAT, MODEL, EngineDouble, pieces, recorded
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.wire import Wire, http_request, streamed
from tuneloop.explorer import edge
from tuneloop.explorer.dialects import dialect
from tuneloop.shared.errors import EngineError

pytestmark = pytest.mark.contract

BODIES: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    "/v1/responses": {"model": MODEL, "input": "3+4="},
    "/v1/messages": HELLO,
}
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
COMMENT = b": keep-alive\n\n"


@pytest.mark.parametrize("path", BODIES)
def test_no_proxy_gathers_or_keeps_a_stream(explorer: RunningExplorer, path: str) -> None:
    whole, stream = (explorer.http.post(path, json=BODIES[path] | {"stream": each}) for each in (False, True))
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert (stream.headers["x-accel-buffering"], stream.headers["cache-control"]) == ("no", "no-cache")
    assert "x-accel-buffering" not in whole.headers


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "KEEP_ALIVE_S", 0.05)


def without_keep_alive(path: str, content: bytes) -> bytes:
    event = PING if path == "/v1/messages" else COMMENT
    assert event in content
    return content.replace(event, b"")


@pytest.mark.usefixtures("short_silence")
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_a_silent_stream_is_kept_alive_and_recorded_as_ever(
    running_explorer: Run, double: EngineDouble, path: str
) -> None:
    explorer = running_explorer(double)
    double.piece_pause_s = 0.15
    stream = explorer.http.post(path, json=BODIES[path] | {"stream": True})
    events = without_keep_alive(path, stream.content).split(b"\n\n")
    assert all(each.startswith((b"data: ", b"event: ")) for each in events[:-1])
    assert stream.headers["x-tuneloop-version"] == "0"
    double.piece_pause_s = 0.0
    explorer.http.post(path, json=BODIES[path] | {"stream": True})
    slow, fast = (each.experiences[0] for each in explorer.exchanges())
    assert slow.drop_reason is None
    assert (slow.text, slow.completion_ids) == (fast.text, fast.completion_ids)


def ask(path: str, url: str) -> list[Any]:
    """The events of a stream as the official client reads them."""
    if path == "/v1/messages":
        with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client:
            return list(client.messages.create(model=MODEL, messages=HELLO["messages"], max_tokens=12, stream=True))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        if path == CHAT:
            return list(client.chat.completions.create(**HELLO, stream=True))
        return list(client.responses.create(model=MODEL, input="3+4=", stream=True))


@pytest.mark.usefixtures("short_silence")
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_a_stream_begins_before_its_engine_answers_and_clients_read_it(
    running_explorer: Run, double: EngineDouble, path: str
) -> None:
    explorer = running_explorer(double)
    kinds = [type(each) for each in ask(path, explorer.url)]
    double.hangs = True
    with explorer.http.stream("POST", path, json=BODIES[path] | {"stream": True}) as stream:
        assert (stream.status_code, stream.headers["x-accel-buffering"]) == (200, "no")
        double.hangs = False
        assert without_keep_alive(path, stream.read())
    double.hangs = True
    threading.Timer(0.5, setattr, (double, "hangs", False)).start()
    assert [type(each) for each in ask(path, explorer.url)] == kinds
    first, *others = explorer.exchanges()
    assert len(others) == 2
    assert all(each.experiences[0].completion_ids == first.experiences[0].completion_ids for each in others)


def fail(double: EngineDouble) -> None:
    double.status, double.hangs = 400, False


@pytest.mark.usefixtures("short_silence")
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(("cause", "sentence"), [("timeout", "did not answer in time"), ("refusal", "no")])
def test_an_error_after_the_stream_began_is_an_event_that_clients_raise(
    running_explorer: Run, double: EngineDouble, path: str, cause: str, sentence: str
) -> None:
    explorer, double.hangs = running_explorer(double, request_timeout=2), True
    if cause == "refusal":
        threading.Timer(0.5, fail, (double,)).start()
    if path == "/v1/responses":
        *_, failed = ask(path, explorer.url)
        assert failed.type == "response.failed"
        assert sentence in failed.response.error.message
    else:
        with pytest.raises((openai.APIError, anthropic.APIError), match=sentence):
            ask(path, explorer.url)
    assert not explorer.exchanges()


@pytest.mark.usefixtures("short_silence")
def test_a_stream_that_waits_for_a_place_is_kept_alive(running_explorer: Run, double: EngineDouble) -> None:
    explorer, double.hangs = running_explorer(double, max_in_flight=1, wait_timeout=0.7), True
    first = threading.Thread(target=explorer.chat)
    first.start()
    eventually(lambda: bool(double.chats))
    stream = explorer.chat(stream=True)
    double.hangs = False
    first.join()
    assert without_keep_alive(CHAT, stream.content).startswith(b'data: {"error":')
    assert "overloaded" in stream.text


@pytest.mark.usefixtures("short_silence")
def test_a_stream_of_http_1_0_is_kept_alive(running_explorer: Run, double: EngineDouble) -> None:
    explorer, double.piece_pause_s = running_explorer(double), 0.15
    with Wire(explorer.url) as wire:
        wire.send(http_request(streamed(), version="1.0"))
        answer = wire.response()
    assert "transfer-encoding" not in answer.headers
    assert without_keep_alive(CHAT, answer.body).endswith(b"data: [DONE]\n\n")


def test_an_error_before_the_silence_keeps_its_status(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    double.status = 400
    assert explorer.chat(stream=True).status_code == 400


# However a stream is split, its events are the same.


STREAM = recorded("stream_n2_captured.sse")
EVENTS = [piece.removesuffix(b"\n\n") for piece in pieces(STREAM)]


def read(blocks: Iterable[bytes]) -> list[bytes]:
    rest = bytearray()
    return [event for block in blocks for event in dialect.split_events(rest, block)]


@settings(max_examples=60)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_however_a_stream_is_split_its_events_are_the_same(cuts: list[int]) -> None:
    places = sorted({0, len(STREAM), *cuts})
    assert read(STREAM[start:end] for start, end in itertools.pairwise(places)) == EVENTS


def test_byte_by_byte_is_the_same() -> None:
    assert read(bytes([each]) for each in STREAM) == EVENTS


@pytest.mark.parametrize("end", [1, 5, len(STREAM) - 1, len(STREAM) // 2])
def test_an_event_cut_in_its_middle_is_none(end: int) -> None:
    whole = STREAM[:end].count(b"\n\n")
    assert read([STREAM[:end]]) == EVENTS[:whole]


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(EngineError):
        read([b"x" * (1 << 20)] * 17)
