"""Tokens for browsers: feedback on one reply in one name, for a while, and nothing else; and the pages that may."""

from typing import Any

import httpx
import msgspec
import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tuneloop.explorer.tokens import (
    FeedbackClaims,
    TokenSigner,
)
from tuneloop.shared.experience import Scope
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.keys import KeyGrant

pytestmark = pytest.mark.contract

CHAT, ORIGIN = "/v1/chat/completions", "https://app.example.com"
ADMIN_KEY = "admin-key-of-this-test"
CLAIMS = FeedbackClaims("key_1", "acme", "chatcmpl-1", "ann", 5.0, 3)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.fixture
def explorer(running_explorer: Run, double: EngineDouble) -> RunningExplorer:
    return running_explorer(double, cors_allow_origins=[ORIGIN], admin_key=ADMIN_KEY)


@pytest.fixture
def key(explorer: RunningExplorer) -> dict[str, str]:
    grant = KeyGrant(name="web", scopes=(Scope.INFERENCE, Scope.FEEDBACK))
    _, secret = explorer.ledger.keys.create(grant, actor="test")
    eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
def msg_ids(explorer: RunningExplorer, key: dict[str, str]) -> list[str]:
    return [explorer.http.post(CHAT, json=HELLO, headers=key).json()["id"] for _ in range(2)]


def bearer(explorer: RunningExplorer, key: dict[str, str], msg_id: str, **more: Any) -> dict[str, str]:
    answer = explorer.http.post("/v1/feedback_tokens", json={"msg_id": msg_id, **more}, headers=key)
    return {"Authorization": f"Bearer {answer.json()['token']}"}


def rate(explorer: RunningExplorer, headers: dict[str, str], **body: Any) -> httpx.Response:
    return explorer.http.post("/feedback", json={"reward": 1} | body, headers=headers)


def test_a_token_rates_its_reply(explorer: RunningExplorer, key: dict[str, str], msg_ids: list[str]) -> None:
    token = bearer(explorer, key, msg_ids[0], source="ann")
    assert rate(explorer, token, msg_ids=[msg_ids[0]]).json()["accepted"] == 1
    assert rate(explorer, token, msg_ids=[f"{msg_ids[0]}:0"], source="ann").status_code == 200
    assert {row[0] for row in explorer.rows("SELECT source FROM feedback")} == {"key:web/ann"}


def test_a_browser_without_a_source_does_not_speak_for_its_key(
    explorer: RunningExplorer, key: dict[str, str], msg_ids: list[str]
) -> None:
    for headers in (bearer(explorer, key, msg_ids[0]), bearer(explorer, key, f"{msg_ids[0]}:0"), key):
        assert rate(explorer, headers, msg_ids=[msg_ids[0]]).status_code == 200
    sources = {row[0] for row in explorer.rows("SELECT source FROM feedback")}
    assert sources == {"key:web", f"key:web/browser/{msg_ids[0]}"}


def test_a_token_says_nothing_about_anything_else(
    explorer: RunningExplorer, key: dict[str, str], msg_ids: list[str]
) -> None:
    mine, other = msg_ids
    token = bearer(explorer, key, mine)
    for body in (
        {"msg_ids": [other]},
        {"msg_ids": [mine, other]},
        {"msg_ids": [mine], "preferred_over": other},
        {"task_id": "t", "run_id": "0"},
        {"msg_ids": [mine], "task_id": "t", "run_id": "0"},
    ):
        assert code(rate(explorer, token, **body)) == (403, "token_of_another_reply")
    assert code(rate(explorer, token, msg_ids=[mine], source="bob")) == (403, "token_of_another_source")
    for method, path in (("POST", CHAT), ("POST", "/commit"), ("GET", CHAT), ("POST", "/v1/feedback_tokens")):
        assert code(explorer.http.request(method, path, headers=token)) == (403, "scope_missing")
    assert explorer.feedbacks() == []


def test_a_token_ends(explorer: RunningExplorer, key: dict[str, str], msg_ids: list[str]) -> None:
    once = bearer(explorer, key, msg_ids[0], max_events=1)
    assert rate(explorer, once, msg_ids=[msg_ids[0]]).status_code == 200
    assert code(rate(explorer, once, msg_ids=[msg_ids[0]])) == (403, "token_used_up")
    short = bearer(explorer, key, msg_ids[0], expires_in=0.001)
    eventually(lambda: rate(explorer, short, msg_ids=[msg_ids[0]]).status_code == 401)
    assert code(rate(explorer, short, msg_ids=[msg_ids[0]])) == (401, "token_expired")
    lasting = bearer(explorer, key, msg_ids[0])
    [web] = explorer.ledger.keys.all()
    explorer.ledger.keys.revoke(web.key_id, actor="test")
    eventually(lambda: rate(explorer, lasting, msg_ids=[msg_ids[0]]).status_code == 401)


def test_a_token_of_the_admin_key_rates_its_reply_while_that_key_is_set(
    explorer: RunningExplorer, key: dict[str, str], msg_ids: list[str]
) -> None:
    headers = bearer(explorer, {"Authorization": f"Bearer {ADMIN_KEY}"}, msg_ids[0])
    assert rate(explorer, headers, msg_ids=[msg_ids[0]]).status_code == 200
    assert code(rate(explorer, headers, msg_ids=[msg_ids[1]])) == (403, "token_of_another_reply")
    assert code(explorer.http.get("/v1/models", headers=headers)) == (403, "scope_missing")
    [said] = explorer.feedbacks()
    assert said.source == f"key:admin_key/browser/{msg_ids[0]}"
    tokens = TokenSigner(load_key(explorer.settings.job_dir / KEY))
    another = msgspec.structs.replace(CLAIMS, key_id=tokens.admin_key_id(b"another"), expires_at=4e9)
    changed = {"Authorization": f"Bearer {tokens.sign(another)}"}
    assert code(rate(explorer, changed, msg_ids=[msg_ids[0]])) == (401, "token_unknown")


def test_a_token_is_made_for_a_reply_of_the_tenant(explorer: RunningExplorer, key: dict[str, str]) -> None:
    for body, refused in (
        ({}, (404, "unknown_msg_id")),
        ({"msg_id": "chatcmpl-06gvpfojv39qtg7p5hf4v7lb077k9f1ug8tl37d8"}, (404, "unknown_msg_id")),
    ):
        assert code(explorer.http.post("/v1/feedback_tokens", json=body, headers=key)) == refused
    assert explorer.http.post("/v1/feedback_tokens", json={}).status_code == 401


@pytest.mark.parametrize(
    "wrong",
    [{"expires_in": 0}, {"expires_in": 1e6}]
    + [{"max_events": number} for number in (1000, "3", True, -1, 0, 0.5, 1.5)],
)
def test_a_token_has_bounds(
    explorer: RunningExplorer, key: dict[str, str], msg_ids: list[str], wrong: dict[str, Any]
) -> None:
    body = {"msg_id": msg_ids[0], **wrong}
    assert explorer.http.post("/v1/feedback_tokens", json=body, headers=key).status_code == 400


def test_what_was_changed_is_no_token() -> None:
    tokens = TokenSigner(b"k" * 32)
    token = tokens.sign(CLAIMS)
    read = tokens.read(token, FeedbackClaims)
    assert read is not None
    assert (read.msg_id, read.source, read.max_events) == ("chatcmpl-1", "ann", 3)
    for place in range(3, len(token)):
        other = "A" if token[place] != "A" else "B"
        assert tokens.read(token[:place] + other + token[place + 1 :], FeedbackClaims) is None
    for text in ("fb-", "fb-.", token + "x", token * 20, "fb-é.x", token.partition(".")[0]):
        assert tokens.read(text, FeedbackClaims) is None
    assert TokenSigner(b"j" * 32).read(token, FeedbackClaims) is None


def test_listed_pages_may_send_feedback_and_nothing_else(explorer: RunningExplorer, key: dict[str, str]) -> None:
    asks = {"Access-Control-Request-Method": "POST"}
    allowed = explorer.http.options("/feedback", headers={"Origin": ORIGIN, **asks})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (204, ORIGIN)
    assert allowed.headers["access-control-allow-methods"] == "POST"
    refused = explorer.http.post("/feedback", json={}, headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN, "else the page could not read why"
    answered = explorer.http.post("/feedback", json={}, headers={"Origin": ORIGIN, **key})
    assert (answered.status_code, answered.headers["access-control-allow-origin"]) == (400, ORIGIN)
    for path, origin in (("/feedback", "https://evil.example"), (CHAT, ORIGIN), ("/commit", ORIGIN)):
        for answer in (
            explorer.http.options(path, headers={"Origin": origin, **asks}),
            explorer.http.post(path, json={}, headers={"Origin": origin, **key}),
        ):
            assert "access-control-allow-origin" not in answer.headers


def test_listed_pages_come_in_where_nobody_needs_a_key(explorer: RunningExplorer) -> None:
    assert explorer.http.post("/feedback", json={}, headers={"Origin": ORIGIN}).status_code == 400
    assert explorer.http.post("/commit", json={}, headers={"Origin": ORIGIN}).status_code == 403
