"""Without keys: programs of this machine come in, and websites that a browser here has open do not."""

import httpx
import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually, settings_for
from tuneloop.explorer.processes.key_watch import require_keys
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import AccessKey, KeyTable

pytestmark = pytest.mark.contract

CHAT = "/v1/chat/completions"


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8010", "localhost.evil.example", "127.0.0.1.evil", "x", "[::1].evil"]
)
def test_a_name_that_only_points_here_is_refused(explorer: RunningExplorer, host: str) -> None:
    assert code(explorer.http.post(CHAT, json=HELLO, headers={"Host": host})) == (403, "host_not_allowed")
    assert code(explorer.http.get("/metrics", headers={"Host": host})) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "file://",
        "http://[::1].evil",
        "http://127.0.0.1:1@evil.example",
    ],
)
def test_a_page_of_another_site_may_send_nothing(explorer: RunningExplorer, origin: str) -> None:
    for path in (CHAT, "/feedback", "/commit"):
        answer = explorer.http.post(path, content=b"{}", headers={"Origin": origin, "Content-Type": "text/plain"})
        assert code(answer) == (403, "origin_not_allowed")
    assert explorer.http.delete(f"{CHAT}/x", headers={"Origin": origin}).status_code == 403


def test_programs_and_pages_of_this_machine_come_in(explorer: RunningExplorer) -> None:
    for headers in ({}, {"Origin": "http://localhost:3000"}, {"Host": "LOCALHOST"}, {"Host": "127.0.0.7:1"}):
        assert explorer.http.post(CHAT, json=HELLO, headers=headers).status_code == 200


def test_a_name_may_be_allowed(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, allowed_hosts=["Model.internal"])
    assert explorer.http.post(CHAT, json=HELLO, headers={"Host": "model.internal:80"}).status_code == 200


ROUTES = [
    *(("POST", path) for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", f"/trinity{CHAT}")),
    *(("POST", path) for path in ("/tokenize", "/v1/messages/count_tokens", "/feedback", "/commit", f"{CHAT}/x")),
    *(("GET", path) for path in (CHAT, f"{CHAT}/x", "/v1/responses/x", "/v1/models", "/metrics", "/trinity/metrics")),
    *(
        ("GET", path)
        for path in ("/training", "/ui", "/ui/exchanges", "/ui/login", "/ui/static/page.css", "/", "/docs")
    ),
    *(("GET", path) for path in ("/openapi.json", "/version", "/admin/keys", "/run/e30/v1/models", "/none")),
    *(("DELETE", f"{CHAT}/x"), ("POST", "/v1/feedback_tokens"), ("POST", "/ui/login"), ("OPTIONS", "/feedback")),
]


@pytest.mark.parametrize(
    "header", ["X-Forwarded-For", "X-Real-IP", "Forwarded", "Via", "X-Forwarded-Host", "x-forwarded-proto"]
)
def test_what_a_proxy_forwards_without_keys_is_refused_on_every_route(explorer: RunningExplorer, header: str) -> None:
    for method, path in ROUTES:
        answer = explorer.http.request(method, path, json=HELLO, headers={header: "203.0.113.9"})
        assert answer.status_code == 403, path
        assert "make a key (tuneloop keys create" in answer.json()["error"]["message"]
    for path in ("/health", "/health/live", "/health/ready", "/ping", "/api/hello"):  # load balancers ask them
        assert explorer.http.get(path, headers={header: "203.0.113.9"}).status_code == 200


def test_a_token_that_needed_no_key_is_no_key_behind_a_proxy(explorer: RunningExplorer) -> None:
    msg_id = explorer.chat().json()["id"]
    token = explorer.http.post("/v1/feedback_tokens", json={"msg_id": msg_id}).json()["token"]
    headers = {"Authorization": f"Bearer {token}"}
    behind = explorer.http.post("/feedback", json={"msg_ids": [msg_id], "reward": 1}, headers=headers | {"Via": "x"})
    assert code(behind) == (403, "proxied_without_keys")
    assert explorer.http.post("/feedback", json={"msg_ids": [msg_id], "reward": 1}, headers=headers).status_code == 200


def test_keys_and_the_choice_to_be_insecure_admit_what_a_proxy_forwards(
    running_explorer: Run, double: EngineDouble
) -> None:
    via = {"X-Forwarded-For": "203.0.113.9"}
    insecure = running_explorer(double, insecure=True)
    assert insecure.http.post(CHAT, json=HELLO, headers=via).status_code == 200
    keyed = running_explorer(double, admin_key="a-key-that-nobody-guesses")
    admin = {"Authorization": "Bearer a-key-that-nobody-guesses"}
    assert keyed.http.get("/ui/login", headers=via).status_code == 200
    assert code(keyed.http.post(CHAT, json=HELLO, headers=via)) == (403, "proxied_without_keys")
    made = keyed.http.post("/admin/keys", json={"name": "web"}, headers=via | admin)
    key = {"Authorization": f"Bearer {made.json()['key']}"}
    eventually(lambda: keyed.http.post(CHAT, json=HELLO, headers=via | key).status_code == 200)
    assert code(keyed.http.post(CHAT, json=HELLO, headers=via)) == (401, "key_missing")


def test_whoever_is_insecure_lets_everybody_in(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, insecure=True)
    assert explorer.http.post(CHAT, json=HELLO, headers={"Host": "evil.example"}).status_code == 200


def test_elsewhere_a_key_is_needed(tmp_path) -> None:
    settings = settings_for(tmp_path, listen_address="0.0.0.0")
    with pytest.raises(EnvironmentRefused, match="tuneloop keys create"):
        require_keys(settings, KeyTable())
    key = AccessKey(key_id="key_1", digest=b"x", name="web", tenant="default", scopes=(Scope.READ,))
    require_keys(settings, KeyTable((key,), in_force=True, revision=1))
    for allowed in ({"admin_key": "a-key-that-nobody-guesses"}, {"insecure": True}, {"listen_address": "::1"}):
        require_keys(settings_for(tmp_path, **{"listen_address": "0.0.0.0"} | allowed), KeyTable())
