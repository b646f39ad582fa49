"""Tenants are apart: every route of the application, with every scope, about one's own, another's and no object.

A route that is added without a row here fails.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.routing import Route

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.explorer.auth import PAGE, required_scopes
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant, KeyLimits
from tuneloop.shared.settings.feedback import TenantSettings

pytestmark = pytest.mark.contract

JOBS = "/v1/fine_tuning/jobs"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
READ, COMMIT, INFERENCE, FEEDBACK, ADMIN = Scope.READ, Scope.COMMIT, Scope.INFERENCE, Scope.FEEDBACK, Scope.ADMIN

#: The scopes of which one opens each route; none: anybody may ask.
ROWS: dict[tuple[str, str], set[Scope]] = {
    ("POST", CHAT): {INFERENCE},
    ("POST", "/v1/completions"): {INFERENCE},
    ("POST", RESPONSES): {INFERENCE},
    ("POST", "/v1/messages"): {INFERENCE},
    ("POST", "/v1/messages/count_tokens"): {INFERENCE},
    ("POST", "/tokenize"): {INFERENCE},
    ("POST", "/detokenize"): {INFERENCE},
    ("GET", "/tokenizer_info"): {INFERENCE},
    ("GET", "/version"): {INFERENCE},
    ("GET", "/v1/models"): {INFERENCE, READ},
    ("GET", "/v1/models/{name:path}"): {INFERENCE, READ},
    ("DELETE", "/v1/models/{name:path}"): {COMMIT},
    ("GET", JOBS): {READ},
    ("POST", JOBS): {COMMIT},
    ("GET", f"{JOBS}/{{job_id}}"): {READ},
    ("GET", f"{JOBS}/{{job_id}}/events"): {READ},
    ("GET", f"{JOBS}/{{job_id}}/checkpoints"): {READ},
    ("POST", f"{JOBS}/{{job_id}}/{{action}}"): {COMMIT},
    ("GET", f"{RESPONSES}/{{response_id}}"): {INFERENCE, READ},
    ("GET", CHAT): {READ},
    ("GET", f"{CHAT}/{{msg_id}}"): {READ},
    ("GET", f"{CHAT}/{{msg_id}}/messages"): {READ},
    ("GET", f"{CHAT}/{{msg_id}}/explain"): {READ},
    ("POST", f"{CHAT}/{{msg_id}}"): {COMMIT},
    ("DELETE", f"{CHAT}/{{msg_id}}"): {COMMIT},
    ("GET", "/v1/files"): {READ},
    ("POST", "/v1/files"): {COMMIT},
    ("GET", "/v1/files/{file_id}"): {READ},
    ("GET", "/v1/files/{file_id}/content"): {READ},
    ("DELETE", "/v1/files/{file_id}"): {COMMIT},
    ("POST", "/v1/uploads"): {COMMIT},
    ("POST", "/v1/uploads/{upload_id}/parts"): {COMMIT},
    ("POST", "/v1/uploads/{upload_id}/complete"): {COMMIT},
    ("POST", "/v1/uploads/{upload_id}/cancel"): {COMMIT},
    ("POST", "/v1/fine_tuning/alpha/graders/validate"): {COMMIT},
    ("POST", "/v1/fine_tuning/alpha/graders/run"): {COMMIT},
    ("POST", "/feedback"): {FEEDBACK},
    ("POST", "/api/public/scores"): {FEEDBACK},
    ("DELETE", "/api/public/scores/{score_id:path}"): {FEEDBACK},
    ("POST", "/api/public/ingestion"): {FEEDBACK},
    ("POST", "/v1/feedback_tokens"): {FEEDBACK},
    ("POST", "/commit"): {COMMIT},
    ("GET", "/training"): {READ, COMMIT},
    ("GET", "/training/calls"): {READ, COMMIT},
    ("GET", "/metrics"): {Scope.METRICS},
    ("GET", "/admin/keys"): {ADMIN},
    ("POST", "/admin/keys"): {ADMIN},
    ("GET", "/admin/keys/audit"): {ADMIN},
    ("DELETE", "/admin/keys/{key_id}"): {ADMIN},
    ("GET", "/admin/raters"): {ADMIN},
    ("GET", "/admin/policies"): {ADMIN},
    ("POST", "/admin/policies"): {ADMIN},
    ("POST", "/admin/policies/{name}/{action}"): {ADMIN},
    ("GET", "/admin/versions"): {ADMIN},
    ("GET", "/admin/versions/events"): {ADMIN},
    ("GET", "/admin/versions/compare"): {ADMIN},
    ("GET", "/admin/versions/{version}"): {ADMIN},
    ("POST", "/admin/versions/unpin"): {ADMIN},
    ("POST", "/admin/versions/rollback"): {ADMIN},
    ("POST", "/admin/versions/{version}/rollback"): {ADMIN},
    ("POST", "/admin/versions/{version}/reject"): {ADMIN},
    ("POST", "/admin/versions/{version}/promote"): {ADMIN},
    ("POST", "/admin/versions/{version}/pin"): {ADMIN},
    ("POST", "/admin/versions/{version}/unpin"): {ADMIN},
    ("GET", "/"): set(),
    ("GET", "/docs"): set(),
    ("GET", "/openapi.json"): set(),
    ("GET", "/health"): set(),
    ("GET", "/health/live"): set(),
    ("GET", "/api/hello"): set(),
    ("GET", "/health/ready"): set(),
    ("GET", "/ping"): set(),
    ("POST", "/ping"): set(),
}

#: The routes about all tenants.
OF_ALL = ("/admin/versions", "/metrics")

Headers = dict[str, str]


def routes_of(explorer: RunningExplorer) -> set[tuple[str, str]]:
    """Every route of the application, Trinity's without its prefix; the page has sessions of its own in their place."""
    app = explorer.app
    routes = [each for each in app.app.routes if isinstance(each, Route)]
    found = {(method, each.path) for each in routes for method in each.methods or () if method != "HEAD"}
    return {
        (method, path.removeprefix("/trinity"))
        for method, path in found | {("POST", path) for path in app.routes}
        if not path.startswith(PAGE)
    }


class Names(NamedTuple):
    """What one asks about: an object of somebody, or of nobody."""

    completion: str
    response: str
    task: str
    run: str
    tag: str
    key_id: str


class Tenant(NamedTuple):
    """A tenant with an object of each kind; one key with every scope but admin, and one of each scope."""

    headers: Headers
    by_scope: dict[Scope, Headers]
    names: Names


UNKNOWN = Names(
    "chatcmpl-06gvpfojv39qtg7p5hf4v7lb077k9f1ug8tl37d8",
    "resp_06gvpfojv39qtg7p5hf4v7lb077k9f1ug8tl37d8",
    *("task-of-nobody", "run-of-nobody", "tag-of-nobody", "key_000000000000"),
)


@pytest.fixture
def explorer(running_explorer: Run, double: EngineDouble) -> RunningExplorer:
    return running_explorer(double)


def tenant(explorer: RunningExplorer, name: str) -> Tenant:
    def key(label: str, *scopes: Scope) -> Headers:
        _, secret = explorer.ledger.keys.create(KeyGrant(name=label, scopes=scopes, tenant=name), actor="test")
        return {"Authorization": f"Bearer {secret}"}

    by_scope = {scope: key(str(scope), scope) for scope in Scope}
    headers = key("app", READ, COMMIT, INFERENCE, FEEDBACK)
    eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
    eventually(lambda: explorer.http.get("/v1/models", headers=headers).status_code == 200)
    task, run, tag = f"task-{name}", f"run-{name}", f"tag-{name}"
    body = HELLO | {"metadata": {"task_id": task, "run_id": run, "colour": tag}}
    completion = explorer.http.post(CHAT, json=body, headers=headers).json()["id"]
    asked = {"model": HELLO["model"], "input": "3+4="}
    response = explorer.http.post(RESPONSES, json=asked, headers=headers).json()["id"]
    explorer.http.post("/feedback", json={"msg_ids": [completion], "reward": 1}, headers=headers)
    explorer.until_flushed()
    grant = KeyGrant(name="spare", scopes=(READ,), tenant=name)
    spare, _ = explorer.ledger.keys.create(grant, actor="test")
    return Tenant(headers, by_scope, Names(completion, response, task, run, tag, spare.key_id))


@pytest.fixture
def acme(explorer: RunningExplorer) -> Tenant:
    return tenant(explorer, "acme")


@pytest.fixture
def globex(explorer: RunningExplorer, acme: Tenant) -> Tenant:
    return tenant(explorer, "globex")


def test_every_route_has_a_row(explorer: RunningExplorer) -> None:
    assert routes_of(explorer) == set(ROWS)


def test_the_page_shows_nobody_anything_without_a_session(explorer: RunningExplorer, acme: Tenant) -> None:
    pages = {
        (method, each.path)
        for each in explorer.app.app.routes
        if (path := getattr(each, "path", "")).startswith(PAGE)
        for method in getattr(each, "methods", None) or ("GET",)
    }
    assert len(pages) > 5
    shown = set()
    for method, path in sorted(pages):
        place = path.replace("{msg_id}", acme.names.completion).replace("{run_id}", acme.names.run)
        for name, headers in {"nobody": {}, **acme.by_scope}.items():
            answer = explorer.http.request(method, place, headers=headers)
            shown |= {path} if answer.status_code == 200 else set()
            assert not any(each in answer.text for each in acme.names), (method, path, name)
    assert shown == {f"{PAGE}/login"}


@pytest.mark.parametrize("prefix", ["", "/trinity"])
def test_every_route_asks_for_its_scopes(prefix: str) -> None:
    for (method, path), scopes in ROWS.items():
        assert required_scopes(method, prefix + path) == scopes, (method, path)


@pytest.mark.parametrize("path", ["/trinity" * 20_000 + "/feedback", "/trinity/trinity/feedback", "/trinity/"])
def test_trinitys_prefix_is_taken_off_once(path: str) -> None:
    assert required_scopes("POST", path) == {ADMIN}


def test_no_key_opens_what_its_scope_does_not(explorer: RunningExplorer, acme: Tenant) -> None:
    for (method, path), scopes in ROWS.items():
        for scope, headers in acme.by_scope.items():
            answer = explorer.http.request(method, path, headers=headers, json={} if method == "POST" else None)
            is_open = not scopes or scope in scopes or scope is ADMIN
            if scope is ADMIN and path.startswith(OF_ALL):
                is_open = False
            assert (answer.status_code != 403) == is_open, (method, path, scope)
            assert answer.status_code != 401
        without = explorer.http.request(method, path, json={} if method == "POST" else None)
        assert (without.status_code == 401) == bool(scopes), (method, path)


Ask = Callable[[httpx.Client, Headers, Names], httpx.Response]


def ask(method: str, path: str, **body: Any) -> Ask:
    """A request about the names; `{…}` in the path and in the body's strings is filled in."""

    def fill(value: Any, names: Names) -> Any:
        if isinstance(value, dict):
            return {key: fill(each, names) for key, each in value.items()}
        if isinstance(value, list):
            return [fill(each, names) for each in value]
        return value.format(**names._asdict()) if isinstance(value, str) else value

    def send(http: httpx.Client, headers: Headers, names: Names) -> httpx.Response:
        return http.request(method, fill(path, names), headers=headers, json=fill(body, names) if body else None)

    return send


ABOUT_OBJECTS: dict[str, Ask] = {
    "read": ask("GET", f"{CHAT}/{{completion}}"),
    "messages": ask("GET", f"{CHAT}/{{completion}}/messages"),
    "explain": ask("GET", f"{CHAT}/{{completion}}/explain"),
    "explain a response": ask("GET", f"{CHAT}/{{response}}/explain"),
    "list after": ask("GET", f"{CHAT}?after={{completion}}"),
    "list by tag": ask("GET", f"{CHAT}?metadata[colour]={{tag}}"),
    "relabel": ask("POST", f"{CHAT}/{{completion}}", metadata={"colour": "mine"}),
    "delete": ask("DELETE", f"{CHAT}/{{completion}}"),
    "response": ask("GET", f"{RESPONSES}/{{response}}"),
    "stream a response": ask("GET", f"{RESPONSES}/{{response}}?stream=true"),
    "continue": ask("POST", RESPONSES, model=HELLO["model"], input="?", previous_response_id="{response}"),
    "rate": ask("POST", "/feedback", msg_ids=["{completion}"], reward=-1),
    "score": ask("POST", "/api/public/scores", traceId="{completion}", name="user-feedback", value=1),
    "score a run": ask("POST", "/api/public/scores", traceId="{run}", name="user-feedback", value=1),
    "a token": ask("POST", "/v1/feedback_tokens", msg_id="{completion}"),
    "rate a choice": ask("POST", "/feedback", msg_ids=["{completion}:0"], reward=-1),
    "rate a run": ask("POST", "/feedback", task_id="{task}", run_id="{run}", reward=-1),
    "commit a task": ask("POST", "/commit", task_id="{task}"),
    "count calls": ask("GET", "/training/calls?task_id={task}&run_id={run}"),
    "count tokens": ask("GET", "/training/calls?task_id={task}&run_id={run}&tokens=true"),
    "revoke a key": ask("DELETE", "/admin/keys/{key_id}"),
}

#: What only an administrator may ask.
ADMINS = {"revoke a key"}


def masked(answer: httpx.Response, names: Names) -> tuple[int, str, Any]:
    """The status and the body of an answer, and its type, without the names that were asked about."""
    text = answer.text
    for name in names:
        text = text.replace(name, "NAME")
    return answer.status_code, answer.headers["content-type"], text


def rows(explorer: RunningExplorer, name: str) -> list[Any]:
    """What the ledger has of a tenant's replies."""
    query = "SELECT msg_id, state, reward, committed_at FROM experiences WHERE tenant = '{}' ORDER BY id"
    changed = "SELECT msg_id, metadata FROM changed_metadata"
    return [*explorer.rows(query.format(name)), *explorer.rows(changed)]


@pytest.mark.parametrize("what", ABOUT_OBJECTS)
def test_anothers_object_is_answered_as_one_that_never_was(
    explorer: RunningExplorer, acme: Tenant, globex: Tenant, what: str
) -> None:
    send, before = ABOUT_OBJECTS[what], rows(explorer, "acme")
    theirs, mine = (each.by_scope[ADMIN] if what in ADMINS else each.headers for each in (globex, acme))
    others = masked(send(explorer.http, theirs, acme.names), acme.names)
    nobodys = masked(send(explorer.http, theirs, UNKNOWN), UNKNOWN)
    assert others == nobodys
    assert rows(explorer, "acme") == before
    own = masked(send(explorer.http, mine, acme.names), acme.names)
    assert own != others or what in {"stream a response", "rate a run"}, "else it would show nothing"


def listed(explorer: RunningExplorer, headers: Headers) -> Iterator[str]:
    yield from (each["id"] for each in explorer.http.get(CHAT, headers=headers).json()["data"])


def test_a_list_and_a_count_are_of_the_tenant_alone(explorer: RunningExplorer, acme: Tenant, globex: Tenant) -> None:
    assert list(listed(explorer, acme.headers)) == [acme.names.completion]
    assert list(listed(explorer, globex.headers)) == [globex.names.completion]
    explorer.http.post(CHAT, json=HELLO, headers=globex.headers)
    explorer.until_flushed()
    training = explorer.http.get("/training", headers=acme.headers).json()
    assert sum(training["experiences"].values()) == 2
    assert training["reasons"] == []


def test_whether_training_is_settled_tells_a_tenant_of_its_own_rows_only(
    explorer: RunningExplorer, acme: Tenant, globex: Tenant
) -> None:
    def is_settled(of: Tenant) -> bool:
        return explorer.http.get("/training", headers=of.headers).json()["settled"] is True

    assert (is_settled(acme), is_settled(globex)) == (True, True)
    done = explorer.http.post(CHAT, json=HELLO, headers=globex.headers).json()["id"]
    explorer.http.post("/feedback", json={"msg_id": done, "reward": 1.0}, headers=globex.headers)
    explorer.http.post("/commit", json={}, headers=globex.headers)
    assert (is_settled(acme), is_settled(globex)) == (True, False)


def test_an_administrator_lists_and_makes_keys_and_raters_of_the_tenant_alone(
    explorer: RunningExplorer, acme: Tenant, globex: Tenant
) -> None:
    http, admin = explorer.http, acme.by_scope[ADMIN]
    for path in ("/admin/keys", "/admin/keys/audit", "/admin/raters"):
        answer = http.get(path, headers=admin)
        found = answer.json()["data"]
        assert {each["tenant"] for each in found} == {"acme"}, path
        assert "globex" not in answer.text
    made = http.post("/admin/keys", json={"name": "new"}, headers=admin).json()
    assert made["tenant"] == "acme"
    for grant in ({"tenant": "globex"}, {"tenant": "default", "scopes": ["admin"]}, {"scopes": ["metrics"]}):
        answer = http.post("/admin/keys", json={"name": "new", **grant}, headers=admin)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_only"), grant
    assert http.delete(f"/admin/keys/{made['key_id']}", headers=admin).status_code == 200
    grant = KeyGrant(name="ops", scopes=(ADMIN,))
    operator = {"Authorization": f"Bearer {explorer.ledger.keys.create(grant, actor='test')[1]}"}
    eventually(lambda: http.get("/metrics", headers=operator).status_code == 200)
    assert {each["tenant"] for each in http.get("/admin/keys", headers=operator).json()["data"]} >= {"acme", "globex"}
    assert http.get("/admin/versions", headers=operator).status_code == 200
    for path in ("/admin/versions", "/admin/versions/0", "/metrics", "/trinity/metrics"):
        assert http.get(path, headers=admin).json()["error"]["code"] == "operator_only", path


def test_an_administrator_of_a_tenant_gives_no_more_than_he_has(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = KeyLimits(requests_per_minute=50, max_concurrent=4)
    grant = KeyGrant(name="boss", tenant="small", scopes=(ADMIN,), limits=limits, expires_in=3600)
    admin = {"Authorization": f"Bearer {explorer.ledger.keys.create(grant, actor='test')[1]}"}
    http = explorer.http
    eventually(lambda: http.get("/admin/keys", headers=admin).status_code == 200)

    def make(**but: object) -> httpx.Response:
        return http.post("/admin/keys", json={"name": "new", **but}, headers=admin)

    made = make().json()
    assert {name: made["limits"][name] for name in ("requests_per_minute", "max_concurrent")} == {
        "requests_per_minute": 50,
        "max_concurrent": 4,
    }
    assert 3500 < made["expires_at"] - made["created_at"] <= 3600
    less = make(limits={"requests_per_minute": 5, "tokens_per_minute": 9}, expires_in=60).json()
    assert (less["limits"]["requests_per_minute"], less["limits"]["tokens_per_minute"]) == (5, 9)
    for more in (
        {"limits": {"requests_per_minute": 51}},
        {"expires_in": 7200},
    ):
        assert (make(**more).status_code, make(**more).json()["error"]["code"]) == (403, "operator_only"), more
    monkeypatch.setattr("tuneloop.explorer.routes.admin.MAX_KEYS", 3)
    assert "3 keys at most" in make().json()["error"]["message"]


def test_two_tenants_have_the_same_names_without_meeting(
    explorer: RunningExplorer, acme: Tenant, globex: Tenant
) -> None:
    labels = {"metadata": {"task_id": "t", "run_id": "0"}, "user": "ann"}
    for each in (acme, globex):
        assert explorer.http.post(CHAT, json=HELLO | labels, headers=each.headers).status_code == 200
    explorer.until_flushed()
    rated = {"task_id": "t", "run_id": "0", "reward": 1, "idempotency_key": "one"}
    assert explorer.http.post("/feedback", json=rated, headers=acme.headers).json()["accepted"] == 1
    rewards = explorer.rows("SELECT tenant, reward FROM experiences WHERE task_id = 't' ORDER BY tenant")
    assert [tuple(each) for each in rewards] == [("acme", 1.0), ("globex", None)]
    told = explorer.http.post("/feedback", json=rated | {"reward": -1}, headers=globex.headers).json()
    assert told["accepted"] == 1, "another's idempotency key is no duplicate"
    assert explorer.http.post("/commit", json={"task_id": "t"}, headers=acme.headers).json()["committed"] == 1
    states = explorer.rows("SELECT tenant, state FROM experiences WHERE task_id = 't' ORDER BY tenant")
    assert [tuple(each) for each in states] == [("acme", "committed"), ("globex", "rewarded")]


def test_the_settings_say_what_holds_for_a_tenant_whose_requests_do_not(tmp_path: Path, double: EngineDouble) -> None:
    tenants = {"acme": TenantSettings(store=False), "globex": TenantSettings(train=False)}
    settings = settings_for(tmp_path, [double.url]).model_copy(update={"tenants": tenants})
    with explorer_running(settings) as explorer:
        _ask_as_tenants(explorer)


def _ask_as_tenants(explorer: RunningExplorer) -> None:
    headers = {}
    for name in ("acme", "globex", "other"):
        grant = KeyGrant(name=name, tenant=name, scopes=(Scope.INFERENCE, Scope.READ))
        headers[name] = {"Authorization": f"Bearer {explorer.ledger.keys.create(grant, actor='test')[1]}"}
        eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
        eventually(lambda name=name: explorer.http.get("/v1/models", headers=headers[name]).status_code == 200)
    trains, not_ = {"metadata": {"train": "true"}}, {"metadata": {"train": "false"}}
    for more in ({}, {"store": True}, trains, not_, {"store": False}):
        for each in headers.values():
            assert explorer.http.post(CHAT, json=HELLO | more, headers=each).status_code == 200
    explorer.until_flushed()
    query = "SELECT reason FROM experiences WHERE tenant = '{}' ORDER BY id"
    kept = {name: [row[0] for row in explorer.rows(query.format(name))] for name in headers}
    assert kept == {
        "acme": [None],
        "globex": ["opt_out", "opt_out", None, "opt_out"],
        "other": [None, None, None, "opt_out"],
    }


def test_what_is_the_operators_does_not_reach_the_engine(
    explorer: RunningExplorer, acme: Tenant, double: EngineDouble
) -> None:
    fields = {"priority": -5, "request_id": "x", "kv_transfer_params": {"do_remote_decode": True}, "cache_salt": "mine"}
    fields |= {"session_id": "s", "vllm_xargs": {"kv_transfer_params": "x", "session_id": "s"}}
    operators = fields.keys() - {"cache_salt"}
    answer = explorer.http.post(CHAT, json=HELLO | fields, headers=acme.headers)
    assert answer.status_code == 200
    sent = double.chats[-1].body
    assert not operators & sent.keys()
    assert sent["cache_salt"] == "acme:mine"
    assert operators <= set(answer.headers["x-tuneloop-ignored"].split(", "))
    named = HELLO | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "x"}]}]}
    explorer.http.post(CHAT, json=named, headers=acme.headers)
    assert double.chats[-1].body["cache_salt"] == "acme"
    assert double.chats[-1].body["messages"][0]["content"][0]["uuid"] == "acme:x"


@pytest.mark.parametrize("ending", ["%0A", "%0D", "%00", "%E2%80%A8"])
@pytest.mark.parametrize("path", ["/metrics", "/admin/versions", "/admin/keys", "/training"])
def test_a_path_that_only_a_route_takes_for_another_one_opens_nothing(
    explorer: RunningExplorer, acme: Tenant, path: str, ending: str
) -> None:
    assert explorer.http.get(path + ending, headers=acme.by_scope[ADMIN]).status_code == 404
