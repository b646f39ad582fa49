"""Keys: who gets in, with which scope, by which way, how much of it; and that a revoked one does not."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.wire import BODY, Wire
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant, KeyLimits

pytestmark = pytest.mark.contract

CHAT = "/v1/chat/completions"

MakeKey = Callable[..., dict[str, str]]


@pytest.fixture
def make_key(explorer: RunningExplorer) -> MakeKey:
    """Make a key that the explorer knows; the headers that bring it."""

    def make(*scopes: Scope, name: str = "web", **but: Any) -> dict[str, str]:
        grant = KeyGrant(name=name, scopes=scopes or (Scope.INFERENCE,), **but)
        _, secret = explorer.ledger.keys.create(grant, actor="test")
        headers = {"Authorization": f"Bearer {secret}"}
        eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
        eventually(lambda: explorer.http.get("/v1/models", headers=headers).status_code != 401)
        return headers

    return make


def secret_of(headers: dict[str, str]) -> str:
    return headers["Authorization"].removeprefix("Bearer ")


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_from_the_first_key_on_nobody_comes_in_without_one(explorer: RunningExplorer, make_key: MakeKey) -> None:
    assert explorer.chat().status_code == 200
    key = make_key()
    refused = explorer.chat()
    assert code(refused) == (401, "key_missing")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert code(explorer.http.post(CHAT, json=HELLO, headers={"x-api-key": "tl-guess"})) == (401, "key_unknown")
    assert explorer.http.post(CHAT, json=HELLO, headers=key).status_code == 200
    assert explorer.http.get("/health/live").status_code == 200


def test_a_key_comes_in_every_way_that_clients_have(explorer: RunningExplorer, make_key: MakeKey) -> None:
    secret = secret_of(make_key())
    placeholder = {"Authorization": "Bearer none", "x-api-key": secret}
    assert explorer.http.post(CHAT, json=HELLO, headers={"x-api-key": secret}).status_code == 200
    assert explorer.http.post(CHAT, json=HELLO, headers=placeholder).status_code == 200
    assert explorer.http.post(f"/key/{secret}{CHAT}", json=HELLO).status_code == 200
    assert explorer.http.get(f"/key/{secret}/v1/models").status_code == 200
    assert code(explorer.http.post(f"/key/tl-x{CHAT}", json=HELLO, headers=placeholder)) == (401, "key_unknown")


def test_a_key_stands_before_a_run(explorer: RunningExplorer, make_key: MakeKey) -> None:
    secret = secret_of(make_key())
    run = "eyJ0YXNrX2lkIjoidCIsInJ1bl9pZCI6IjAifQ"
    assert explorer.http.post(f"/key/{secret}/run/{run}{CHAT}", json=HELLO).status_code == 200
    [row] = explorer.rows("SELECT task_id, run_id FROM experiences")
    assert tuple(row) == ("t", "0")


def test_no_answer_repeats_the_key_of_a_path(explorer: RunningExplorer, make_key: MakeKey) -> None:
    secret = secret_of(make_key())
    for path in ("/nowhere", "/admin/versions", "/v1/chat/completions/x"):
        answer = explorer.http.get(f"/key/{secret}{path}")
        assert answer.status_code in {403, 404}
        assert secret not in answer.text + str(answer.headers)


def test_a_scope_is_asked_for(explorer: RunningExplorer, make_key: MakeKey) -> None:
    raters = make_key(Scope.FEEDBACK, name="raters")
    assert code(explorer.http.post(CHAT, json=HELLO, headers=raters)) == (403, "scope_missing")
    assert code(explorer.http.post("/commit", json={}, headers=raters)) == (403, "scope_missing")
    assert code(explorer.http.get("/metrics", headers=raters)) == (403, "scope_missing")
    assert code(explorer.http.post("/feedback", json={}, headers=raters)) == (400, "missing")
    operator = make_key(Scope.ADMIN, name="operator")
    assert explorer.http.post(CHAT, json=HELLO, headers=operator).status_code == 200
    assert explorer.http.get("/metrics", headers=operator).status_code == 200


def test_a_revoked_key_is_refused_within_two_seconds(explorer: RunningExplorer, make_key: MakeKey) -> None:
    make_key(name="other")
    key = make_key()
    [web] = [each for each in explorer.ledger.keys.all() if each.name == "web"]
    assert explorer.ledger.keys.revoke(web.key_id, actor="test")
    eventually(lambda: explorer.http.post(CHAT, json=HELLO, headers=key).status_code == 401)


def test_an_expired_key_says_so(explorer: RunningExplorer, make_key: MakeKey) -> None:
    key = make_key(expires_in=2.0)
    eventually(lambda: explorer.http.get("/v1/models", headers=key).status_code == 401)
    assert code(explorer.http.get("/v1/models", headers=key)) == (401, "key_expired")


def test_a_refused_body_is_not_waited_for(explorer: RunningExplorer, make_key: MakeKey) -> None:
    make_key()
    with Wire(explorer.url) as wire:
        wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000000\r\n\r\n{")
        answer = wire.response()
        assert (answer.status, answer.headers["connection"]) == (401, "close")
    with Wire(explorer.url) as wire:  # with its body here, the connection may stay
        request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
        for _ in range(2):
            wire.send(request % (len(BODY), BODY))
            assert wire.response().status == 401


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute"])
def test_a_limit_a_minute_holds(explorer: RunningExplorer, make_key: MakeKey, name: str) -> None:
    key = make_key(Scope.INFERENCE, limits=KeyLimits(**{name: 3}))
    answers = [explorer.http.post(CHAT, json=HELLO, headers=key) for _ in range(4)]
    refused = answers[-1]
    assert code(refused) == (429, f"key_limit_{name.removesuffix('_per_minute')}")
    assert float(refused.headers["retry-after-ms"]) > 0


def test_feedback_beyond_a_limit_is_refused_whole(explorer: RunningExplorer, make_key: MakeKey) -> None:
    key = make_key(Scope.FEEDBACK, Scope.INFERENCE, limits=KeyLimits(feedback_per_minute=2))
    ids = [explorer.http.post(CHAT, json=HELLO, headers=key).json()["id"] for _ in range(3)]
    told = explorer.http.post("/feedback", json={"msg_ids": ids, "reward": 1}, headers=key)
    assert code(told) == (429, "key_limit_feedback")
    assert explorer.feedbacks() == []
    assert explorer.http.post("/feedback", json={"msg_ids": ids[:2], "reward": 1}, headers=key).status_code == 200


@pytest.mark.parametrize("path", ["/feedback", "/trinity/feedback"])
def test_feedback_of_a_key_that_has_brought_its_share_is_refused_by_its_head(
    explorer: RunningExplorer, make_key: MakeKey, path: str
) -> None:
    key = make_key(Scope.FEEDBACK, limits=KeyLimits(feedback_per_minute=1))
    body = {"task_id": "t", "run_id": "0", "reward": 1}
    assert explorer.http.post(path, json=body, headers=key).status_code == 200
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {secret_of(key)}\r\ncontent-length: 9000\r\n\r\n"
    with Wire(explorer.url) as wire:  # the body never comes
        wire.send(head.encode())
        answer = wire.response()
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (429, "key_limit_feedback")
    assert 55 < float(answer.headers["retry-after"]) <= 60
    assert explorer.http.post("/v1/feedback_tokens", json={"msg_id": "x"}, headers=key).status_code == 404


def test_so_many_requests_at_once(explorer: RunningExplorer, make_key: MakeKey, double: EngineDouble) -> None:
    key = make_key(Scope.INFERENCE, limits=KeyLimits(max_concurrent=1))
    with Wire(explorer.url) as first:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {secret_of(key)}\r\nexpect: 100-continue\r\n"
        first.send(f"{head}content-length: {len(BODY)}\r\n\r\n".encode())
        assert first.response().status == 100  # it has come in, and its body is waited for
        assert code(explorer.http.post(CHAT, json=HELLO, headers=key)) == (429, "key_limit_concurrency")
        first.send(BODY)
        assert first.response().status == 200
    assert explorer.http.post(CHAT, json=HELLO, headers=key).status_code == 200


def test_feedback_is_in_the_name_of_the_key(explorer: RunningExplorer, make_key: MakeKey) -> None:
    key = make_key(Scope.FEEDBACK, Scope.INFERENCE)
    msg_id = explorer.http.post(CHAT, json=HELLO, headers=key).json()["id"]
    for source in ({}, {"source": "ann"}, {"source": "key:other/ann"}):
        body = {"msg_ids": [msg_id], "reward": 1, **source}
        assert explorer.http.post("/feedback", json=body, headers=key).status_code == 200
    sources = {row[0] for row in explorer.rows("SELECT source FROM feedback")}
    assert sources == {"key:web", "key:web/ann", "key:web/key:other/ann"}


def test_keys_are_made_and_revoked_by_the_api(explorer: RunningExplorer, make_key: MakeKey) -> None:
    operator = make_key(Scope.ADMIN, name="operator")
    body = {"name": "app", "tenant": "acme", "scopes": ["inference"], "limits": {"max_concurrent": 2}}
    made = explorer.http.post("/admin/keys", json=body, headers=operator).json()
    key = {"Authorization": f"Bearer {made['key']}"}
    eventually(lambda: explorer.http.post(CHAT, json=HELLO, headers=key).status_code == 200)
    listed = explorer.http.get("/admin/keys", headers=operator)
    assert [each["name"] for each in listed.json()["data"]] == ["operator", "app"]
    assert made["key"] not in listed.text
    assert explorer.http.delete(f"/admin/keys/{made['key_id']}", headers=operator).status_code == 200
    assert explorer.http.delete(f"/admin/keys/{made['key_id']}", headers=operator).status_code == 404
    eventually(lambda: explorer.http.post(CHAT, json=HELLO, headers=key).status_code == 401)
    events = explorer.http.get("/admin/keys/audit", headers=operator).json()["data"]
    assert [(each["action"], each["name"], each["actor"]) for each in events][:2] == [
        ("revoked", "app", "operator"),
        ("created", "app", "operator"),
    ]
    assert code(explorer.http.post("/admin/keys", json={"name": "a b"}, headers=operator)) == (400, "invalid_value")
    assert code(explorer.http.post("/admin/keys", json={"cats": 1}, headers=operator)) == (400, "invalid_value")


def test_refusals_are_counted_by_their_reasons(explorer: RunningExplorer, make_key: MakeKey) -> None:
    operator = make_key(Scope.ADMIN, name="operator")
    for _ in range(3):
        assert explorer.http.post(CHAT, json=HELLO, headers={"x-api-key": "tl-guess"}).status_code == 401
    text = explorer.http.get("/metrics", headers=operator).text
    assert 'tuneloop_access_refused_total{reason="key_unknown"} 3.0' in text


def test_known_keys_go_on_while_the_database_is_away(explorer: RunningExplorer, make_key: MakeKey) -> None:
    key = make_key()

    def away() -> int:
        raise AssertionError("it is asked, and fails")

    explorer.ledger.keys.revision = away  # type: ignore[method-assign]
    assert explorer.http.post(CHAT, json=HELLO, headers=key).status_code == 200
    assert explorer.chat().status_code == 401
    remembered = json.loads((explorer.settings.job_dir / "keys.json").read_bytes())
    assert remembered["in_force"]
    assert secret_of(key) not in json.dumps(remembered)
    assert (explorer.settings.job_dir / "keys.json").stat().st_mode & 0o777 == 0o600


def test_the_first_request_of_a_loopback_needs_none(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    for headers in ({}, {"Authorization": "Bearer anything"}, {"Host": "localhost:1"}, {"Host": "[::1]:80"}):
        assert explorer.http.post(CHAT, json=HELLO, headers=headers).status_code == 200


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_a_header_that_brings_two_keys_brings_none(explorer: RunningExplorer, make_key: MakeKey, name: str) -> None:
    begin = "Bearer " if name == "authorization" else ""
    one, other = (f"{begin}{secret_of(make_key(name=each))}" for each in ("one", "other"))
    for two in ((one, other), (other, one), (one, f"{begin}none"), (f"{begin}none", one)):
        answer = explorer.http.post(CHAT, json=HELLO, headers=[(name, each) for each in two])
        assert code(answer) == (400, "ambiguous_header")
    assert explorer.http.post(CHAT, json=HELLO, headers=[(name, one), (name, one)]).status_code == 200
