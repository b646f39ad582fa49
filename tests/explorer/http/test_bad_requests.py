import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.doubles.engine import CHAT, MODEL, EnginePlace
from tests.explorer.running import HELLO, RunningExplorer, explorer_running, settings_for
from tuneloop.explorer.feedback.events import MAX_IDS

pytestmark = pytest.mark.contract

MESSAGES = HELLO["messages"]
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, places: list[EnginePlace]) -> Iterator[RunningExplorer]:
    """One explorer for all bad requests: none of them changes it."""
    folder: Path = tmp_path_factory.mktemp("bad")
    with explorer_running(settings_for(folder, [places[0].fresh().url], max_body_bytes=1 << 20)) as explorer:
        yield explorer


def chat(**but: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": MESSAGES} | but).encode()


def feedback(**but: Any) -> bytes:
    return json.dumps({"msg_ids": ["MINE"], "reward": 1} | but).encode()


NOT_JSON = [b"", b"{", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": Infinity}', b'"\xff"', b'{"a": "\\ud800"}', DEEP]
NOT_OBJECTS = [b"[]", b"null", b"5", b'"x"', b"true"]
BODIES: list[tuple[str, bytes, int]] = [
    *((path, body, 400) for path in (CHAT, "/feedback", "/commit") for body in (*NOT_JSON[1:], *NOT_OBJECTS)),
    (CHAT, b"", 400),
    ("/feedback", b"", 400),
    *((CHAT, chat(**{name: value}), 400) for name in ("stream", "logprobs") for value in ("maybe", 2, [], {})),
    *((CHAT, chat(store=value), 400) for value in ("true", 1, [], {})),
    *((CHAT, chat(metadata={name: value}), 400) for name in ("train", "tuneloop_train") for value in ("maybe", 2, [])),
    *((CHAT, chat(n=n), 400) for n in ("x", 2.5, -1, 1 << 24, [1], {"a": 1})),
    *((CHAT, chat(metadata={"tuneloop_task_id": value}), 400) for value in ([], {}, 1.5, True, "a\0b", "x" * 600)),
    (CHAT, chat(metadata={"tuneloop_run_id": "\0"}), 400),
    (CHAT, chat(user=5), 400),
    *((CHAT, chat(temperature=value), 400) for value in ("x", -1, [], {}, "nan", "inf")),
    *((CHAT, chat(messages=value), 400) for value in (None, [], "x", [1], {})),
    (CHAT, chat(response_format="x", messages=[]), 400),
    (CHAT, b"{}", 400),
    (CHAT, chat(model="nope"), 404),
    (CHAT, chat(padding="x" * (1 << 20)), 413),
    ("/feedback", feedback(padding="x" * (9 << 20)), 413),
    ("/commit", feedback(padding="x" * (9 << 20)), 413),
    *(
        ("/feedback", feedback(reward=value), 400)
        for value in (True, False, "1", None, [1], {}, 1e308, -1e308, 10**9, 10**18)
    ),
    *(("/feedback", b'{"msg_ids": ["MINE"], "reward": %s}' % value, 400) for value in (b"NaN", b"-Infinity", b"1e400")),
    ("/feedback", b'{"msg_ids": ["MINE"], "reward": 1%s}' % (b"0" * 400), 400),
    *(
        ("/feedback", body % value, 400)
        for value in (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"1e308", b"-1e308", b"1000001")
        for body in (
            b'{"msg_ids": ["MINE"], "value": %s}',
            b'{"msg_ids": ["MINE"], "value": %s, "metric": "help", "source": "ann"}',
            b'{"task_id": "t", "run_id": "r", "value": %s}',
            b'{"feedback": [{"msg_ids": ["MINE"], "reward": 1}, {"msg_ids": ["MINE"], "metric": "m", "value": %s}]}',
        )
    ),
    *(
        ("/feedback", b'{"msg_ids": ["MINE"], "reward": 1, "time": %s}' % value, 400)
        for value in (b"NaN", b"Infinity", b"1e400", b"1e308", b"-1e308")
    ),
    *(
        (CHAT, chat(metadata={"tuneloop_priority": value}), 400)
        for value in ("high", "nan", "inf", "-Infinity", "1e400", 1e308, "1e308")
    ),
    ("/feedback", b'{"reward": 1}', 400),
    ("/feedback", b'{"msg_ids": ["MINE"]}', 400),
    *(("/feedback", feedback(msg_ids=value), 400) for value in ("MINE", 5, {}, [["MINE"]], [1], [None], [], None)),
    *(
        ("/feedback", feedback(msg_ids=value), 404)
        for value in (["x"], ["y", "chatcmpl-guess"], ["MINE:1"], ["MINE:-1"], ["MINE:"], ["\0"], [""], ["é"])
    ),
    ("/feedback", feedback(msg_ids=["x"] * (MAX_IDS + 1)), 413),
    *(
        (path, json.dumps({"msg_ids": ["MINE"], "reward": 1, name: value}).encode(), 400)
        for path in ("/feedback", "/commit")
        for name in ("task_id", "run_id")
        for value in ([], {}, 1.5, True, "\0", "x" * 600)
    ),
    *(
        ("/commit", json.dumps({"time_threshold": value}).encode(), 400)
        for value in ("garbage", "", [], {}, True, 1e300, "2026-13-01", "99999-01-01")
    ),
]


def complaint(reply: httpx.Response) -> dict[str, Any]:
    """The error of a reply in OpenAI's envelope, which is a sentence and no more."""
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in reply.text
    assert "site-packages" not in reply.text
    return error


def state(explorer: RunningExplorer) -> tuple[object, ...]:
    return explorer.services.outbox.written, explorer.counts(), len(explorer.rows("SELECT 1 FROM feedback"))


@pytest.fixture(scope="module")
def mine(shared: RunningExplorer) -> str:
    """The id of a reply that exists, so that only what is wrong is refused."""
    found: str = shared.chat().json()["id"]
    return found


@pytest.mark.parametrize(
    ("path", "body", "status"),
    BODIES,
    ids=[f"{path}-{body[:40].decode(errors='replace')}-{number}" for number, (path, body, _) in enumerate(BODIES)],
)
def test_a_bad_request_is_refused_and_changes_nothing(
    shared: RunningExplorer, mine: str, path: str, body: bytes, status: int
) -> None:
    before = state(shared)
    reply = shared.http.post(path, content=body.replace(b"MINE", mine.encode()))
    assert reply.status_code == status
    error = complaint(reply)
    if path != CHAT:
        assert (reply.json()["status"], reply.json()["message"]) == ("error", error["message"])
    assert state(shared) == before


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/feedback", 405),
        ("PUT", "/commit", 405),
        ("POST", "/collective_rpc", 404),
        ("POST", "/pause", 404),
        ("POST", "/v1/load_lora_adapter", 404),
    ],
)
def test_an_unknown_route_or_method_is_said_so(shared: RunningExplorer, method: str, path: str, status: int) -> None:
    reply = shared.http.request(method, path)
    assert reply.status_code == status
    complaint(reply)


def test_a_body_that_never_says_its_length_is_bounded_too(shared: RunningExplorer) -> None:
    def blocks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 16)

    assert shared.http.post(CHAT, content=blocks()).status_code == 413


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
_OURS = ("msg_ids", "reward", "task_id", "run_id", "time_threshold")
_PARAMETERS = (
    "stream",
    "n",
    "store",
    "logprobs",
    "tools",
    "tool_choice",
    "response_format",
    "seed",
    "top_p",
    "metadata",
)
_names = st.sampled_from([*HELLO, *_OURS, *_PARAMETERS, "logit_bias"])
_bodies = st.dictionaries(_names, _anything, max_size=6) | _anything


@settings(max_examples=250, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from([CHAT, "/feedback", "/commit"]), body=_bodies)
def test_whatever_json_comes_it_is_never_our_fault(shared: RunningExplorer, path: str, body: Any) -> None:
    reply = shared.http.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass"))
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400:
        complaint(reply)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(but=st.dictionaries(_names.filter(lambda name: name not in {"model", "messages"}), _anything, max_size=3))
def test_whatever_a_chat_asks_it_is_never_our_fault(shared: RunningExplorer, but: dict[str, Any]) -> None:
    reply = shared.http.post(CHAT, content=json.dumps(HELLO | but).encode("utf-8", "surrogatepass"))
    assert reply.status_code < 500, reply.text


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from([CHAT, "/feedback", "/commit"]), body=st.binary(max_size=60))
def test_whatever_bytes_come_it_is_never_our_fault(shared: RunningExplorer, path: str, body: bytes) -> None:
    assert shared.http.post(path, content=body).status_code < 500
