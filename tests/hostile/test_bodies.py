"""Bodies of strangers: nested deeply, with words where truth values stand, wrong so that an error may tell too much."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.engine import CHAT, MODEL, EngineDouble
from tests.doubles.serving import serving
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO
from tests.hostile.bed import Bed, asking, bed_with, fresh_name
from tests.hostile.echo import EchoDouble, planted
from tests.hostile.fronts import Front, front_before

pytestmark = pytest.mark.contract

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

#: A body for each route that reads one, and the fields in which it may carry anything.
ROUTES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    CHAT: (asking("deep", store=True), ("metadata", "tools", "response_format", "chat_template_kwargs", "extra")),
    "/v1/completions": ({"model": MODEL, "prompt": planted("deep"), "max_tokens": 5}, ("metadata", "extra")),
    RESPONSES: ({"model": MODEL, "input": planted("deep")}, ("metadata", "tools", "text", "reasoning", "extra")),
    MESSAGES: (
        {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": planted("deep")}]},
        ("metadata", "tools", "system", "extra"),
    ),
    "/feedback": ({"msg_ids": ["x"], "reward": 1}, ("demonstration", "comment", "extra")),
    "/commit": ({}, ("time_threshold", "extra")),
    "/tokenize": ({"model": f"{MODEL}@0", "prompt": "x"}, ("messages", "extra")),
    "/detokenize": ({"model": f"{MODEL}@0", "prompt": "x"}, ("tokens", "extra")),
    "/v1/messages/count_tokens": ({"model": f"{MODEL}@0", "prompt": "x"}, ("messages", "system", "extra")),
}


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    double = EchoDouble()
    with (
        serving(double) as double.url,
        bed_with(tmp_path_factory.mktemp("bodies"), [double.url], version_pins=True) as found,
    ):
        yield found
        found.is_sound()


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, (_, fields) in ROUTES.items() for field in fields])
@pytest.mark.parametrize("depth", [100, 198, 199, 200, 201, 253, 254, 255, 511, 1022, 5000])
def test_nothing_fails_on_what_is_nested(bed: Bed, path: str, field: str, depth: int) -> None:
    plain = json.dumps(ROUTES[path][0] | ({"msg_ids": [said(bed)]} if path == "/feedback" else {}))[:-1]
    comma = ", " if len(plain) > 1 else ""
    for start, end in (("[", "]"), ('{"a":', "}")):
        body = f'{plain}{comma}"{field}": {{"a": {start * depth}{"1" if end == "}" else ""}{end * depth}}}}}'
        answer = bed.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, answer.text
        if depth > 200:
            assert answer.status_code == 400


def said(bed: Bed) -> str:
    """The id of a reply."""
    found: str = bed.ask(bed.http).json()["id"]
    return found


@pytest.mark.parametrize("tools", ["x", ["x"], [["x"]], [1], {"a": "b"}, [{}], [{"type": "function"}], [{"type": 5}]])
def test_a_stored_response_can_be_read_whatever_its_request_was(bed: Bed, tools: object) -> None:
    answer = bed.http.post(RESPONSES, json={"model": MODEL, "input": planted(fresh_name()), "tools": tools})
    assert answer.status_code < 500, answer.text
    if answer.status_code == 200:
        assert bed.http.get(f"{RESPONSES}/{answer.json()['id']}").status_code == 200


@pytest.mark.parametrize("key", ["train", "tuneloop_train"])
@pytest.mark.parametrize("word", ["False", "no", "0", "off", "FALSE", "n", "f", 0, False, "false"])
def test_who_says_no_in_any_usual_spelling_is_heard(bed: Bed, key: str, word: object) -> None:
    answer = bed.http.post(CHAT, json=asking(fresh_name(), metadata={key: word}))
    assert answer.status_code in {200, 400}
    if answer.status_code == 200:
        assert bed.http.post("/commit").status_code == 200
        [row] = bed.rows(f"SELECT state, reason FROM experiences WHERE msg_id = '{answer.json()['id']}'")
        assert row == ("dropped", "opt_out")


@pytest.mark.parametrize("key", ["train", "tuneloop_train"])
@pytest.mark.parametrize("word", ["maybe", "", "nein", "-", 2, 0.5, [], {}, [False]])
def test_who_says_neither_yes_nor_no_is_refused_and_nothing_is_stored(bed: Bed, key: str, word: object) -> None:
    assert bed.http.post("/commit").status_code == 200
    before = len(bed.stored_ids())
    assert bed.http.post(CHAT, json=asking(fresh_name(), metadata={key: word})).status_code == 400
    assert bed.http.post("/commit").status_code == 200
    assert len(bed.stored_ids()) == before


@pytest.mark.parametrize("path", ["/commit/", "/feedback/", f"{CHAT}/", "/v1/models/", "/health/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nobody_is_sent_elsewhere(bed: Bed, method: str, path: str) -> None:
    answer = bed.http.request(method, path, headers={"Host": "127.0.0.1.elsewhere.example"}, json={})
    assert answer.status_code in {400, 403, 404, 405, 421}
    assert "location" not in answer.headers
    assert "elsewhere" not in answer.text


def refusals(bed: Bed) -> list[httpx.Response]:
    """Answers to all sorts of what is wrong."""
    bad = [b"", b"{", b"[]", b'{"model": 5}', b'{"msg_ids": 7}', b'{"time_threshold": "x"}', b"\xff"]
    found = [bed.http.post(path, content=body) for path in ROUTES for body in bad]
    names = ("chatcmpl-nothing", "../../etc/passwd", "%00", "x" * 5000, "' OR 1=1 --")
    found += [bed.http.get(f"{path}/{name}") for path in (CHAT, RESPONSES, "/admin/versions") for name in names]
    return [each for each in found if each.status_code >= 400]


def test_refusals_name_nothing_of_the_operators(bed: Bed) -> None:
    answers = refusals(bed)
    assert len(answers) > 30
    for answer in answers:
        assert answer.status_code < 500, answer.text
        for secret in (str(bed.folder), "sqlite", "site-packages", "Traceback", "exp_buffer", ".py"):
            assert secret not in answer.text


# Without keys, a real proxy on the same machine lets no stranger in.


@pytest.mark.parametrize("kind", ["nginx", "haproxy"])
def test_behind_a_proxy_without_keys_nothing_is_answered_but_that_a_key_is_needed(
    running_explorer: Run, double: EngineDouble, tmp_path: Path, kind: Front
) -> None:
    explorer = running_explorer(double)
    with front_before(explorer.url, kind, tmp_path, forwards=True) as url, httpx.Client(base_url=url) as stranger:
        for method, path in (("POST", CHAT), ("GET", CHAT), ("GET", "/metrics"), ("GET", "/ui"), ("POST", "/feedback")):
            answer = stranger.request(method, path, json=HELLO)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "proxied_without_keys"), path
            assert "tuneloop keys create" in answer.text
        assert stranger.get("/health/ready").status_code == 200
    assert explorer.chat().status_code == 200
