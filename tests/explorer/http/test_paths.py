"""Paths and methods that are not there, what is said of them, and pages of other origins that ask the model."""

import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tuneloop.explorer.http.errors import error_response, refusal_of
from tuneloop.shared.errors import LedgerForbidden, LedgerUnavailable, TuneloopError
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant

CHAT, ORIGIN = "/v1/chat/completions", "https://app.example.com"
AZURE = "/openai/deployments/m/chat/completions"


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/v1/v1/chat/completions", "has /v1 twice: the base URL is {base}"),
        ("POST", "/chat/completions", "has no /v1: the base URL is {base}"),
        ("GET", "/models", "has no /v1: the base URL is {base}"),
        ("POST", f"{CHAT}/", f"without the slash at its end: {CHAT}"),
        ("GET", "/v1/models/", "without the slash at its end: /v1/models"),
        ("POST", AZURE, "Azure's paths are not served: use OpenAI's own client, with base_url {base}"),
        ("POST", "/api/chat", "Ollama's paths are not served"),
        ("POST", "/v1beta/models/m:generateContent", "Gemini's paths are not served"),
        ("POST", "/v1/embeddings", "the model generates text, and nothing else"),
        ("POST", "/v1/batches", "ratings by POST /feedback"),
        ("POST", "/v1/responses/compact", "not served: send all turns"),
        ("GET", "/none", ""),
    ],
)
def test_a_404_says_what_was_meant(explorer: RunningExplorer, method: str, path: str, meant: str) -> None:
    answer = explorer.http.request(method, path, json=HELLO)
    said = answer.json()["error"]
    assert (answer.status_code, said["code"]) == (404, "not_found")
    assert said["message"].startswith(f"no route {path}; " if meant else f"no route {path}")
    assert meant.format(base=f"{explorer.url}/v1") in said["message"]


def test_a_slash_too_many_is_no_redirect_to_where_the_client_likes(explorer: RunningExplorer) -> None:
    for path in ("/commit/", "/feedback/", "/health/"):
        answer = explorer.http.post(path, headers={"Host": "evil.example"}, json={})
        assert (answer.status_code, "location" in answer.headers) == (403, False)
        answer = explorer.http.post(path, json={})
        assert (answer.status_code, "location" in answer.headers) == (404, False)


def test_a_key_that_may_only_ask_the_model_hears_it_too(explorer: RunningExplorer) -> None:
    grant = KeyGrant(name="web", tenant="acme", scopes=(Scope.INFERENCE,))
    key = {"Authorization": f"Bearer {explorer.ledger.keys.create(grant, actor='test')[1]}"}
    eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
    answer = explorer.http.post("/chat/completions", json=HELLO, headers=key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert explorer.http.get("/admin/keys", headers=key).status_code == 403


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("PUT", CHAT, "GET, POST"), ("PUT", "/v1/models", "GET"), ("PATCH", f"{CHAT}/x", "DELETE, GET, POST")],
)
def test_all_methods_of_a_path_are_named(explorer: RunningExplorer, method: str, path: str, allowed: str) -> None:
    answer = explorer.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_health_may_be_asked_without_a_body(explorer: RunningExplorer) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/api/hello"):
        answer = explorer.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("stream", [False, True])
def test_listed_pages_may_ask_the_model_and_nothing_else(
    running_explorer: Run, double: EngineDouble, stream: bool
) -> None:
    explorer = running_explorer(double, cors_inference_origins=[ORIGIN])
    asks = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization, x-stainless-os"
    preflight = explorer.http.options(CHAT, headers=asks)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (204, ORIGIN)
    assert preflight.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    for body, status in ((HELLO | {"stream": stream}, 200), ({}, 400)):
        answer = explorer.http.post(CHAT, json=body, headers={"Origin": ORIGIN})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
    for path, origin in ((CHAT, "https://evil.example"), ("/feedback", ORIGIN), ("/commit", ORIGIN)):
        answer = explorer.http.post(path, json=HELLO, headers={"Origin": origin})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        assert explorer.http.options(path, headers=asks | {"Origin": origin}).status_code in (403, 405)


# What a client is told of what went wrong, and what not.


SECRETS = 'connection to server at "db.internal" (10.0.0.7), user "trainer" failed; /data/job/ledger.db'


@pytest.mark.parametrize("error", [LedgerUnavailable(SECRETS), LedgerForbidden(SECRETS), TuneloopError(SECRETS)])
def test_no_error_names_what_is_the_operators(error: Exception) -> None:
    refusal = refusal_of(error)
    body = bytes(error_response(refusal, "/commit", None).body).decode()
    assert not [word for word in ("db.internal", "10.0.0.7", "trainer", "/data") if word in body]
    assert refusal.status in {500, 503}
