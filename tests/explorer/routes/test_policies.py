"""The admin API of policies, and their page: what operators do, and what administrators of a tenant may."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.routes.test_admin import KEY, refusal
from tests.explorer.running import RunningExplorer, adapters_running, eventually
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant


@pytest.fixture
def explorer(tmp_path: Path, double: EngineDouble) -> Iterator[RunningExplorer]:
    """An explorer whose versions are adapters, with an admin key."""
    with adapters_running(tmp_path, double.url, admin_key=KEY) as running:
        yield running


def ask(explorer: RunningExplorer, key: str, path: str = "", body: Any = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    if body is None:
        return explorer.http.get(f"/admin/policies{path}", headers=headers)
    return explorer.http.post(f"/admin/policies{path}", headers=headers, json=body)


def admin_of(explorer: RunningExplorer, tenant: str) -> str:
    grant = KeyGrant(name="boss", scopes=(Scope.ADMIN,), tenant=tenant)
    return explorer.ledger.keys.create(grant, actor="test")[1]


def names(explorer: RunningExplorer, key: str) -> list[str]:
    return [each["name"] for each in ask(explorer, key).json()["data"]]


def test_an_operator_makes_pauses_and_deletes_policies(explorer: RunningExplorer) -> None:
    made = ask(explorer, KEY, body={"name": "support", "options": {"algorithm.gamma": 0.5}}).json()
    assert (made["name"], made["tenant"], made["parent"], made["created_by"]) == ("support", "", 0, "admin:admin_key")
    assert names(explorer, KEY) == ["default", "support"]
    for action, state in (("pause", "paused"), ("resume", "active")):
        assert ask(explorer, KEY, f"/support/{action}", {}).json() == {"name": "support", "done": action}
        assert explorer.ledger.policies.get(1).state == state
    assert refusal(ask(explorer, KEY, "/support/promote", {}))[0] == 400
    assert ask(explorer, KEY, "/support/delete", {}).json()["done"] == "delete"
    assert names(explorer, KEY) == ["default"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "missing required field `name`"),
        ({"name": "a", "rank": 4}, "unknown field `rank`"),
        ({"name": "a", "options": {"model.model_path": "/x"}}, "model.model_path: a policy has no such option"),
        ({"name": "default"}, "default: there is a policy of that name"),
        ({"name": "a", "parent": "b"}, "there is no policy b; there are default"),
    ],
)
def test_what_cannot_be_made_is_refused(explorer: RunningExplorer, body: dict[str, Any], sentence: str) -> None:
    status, _, message = refusal(ask(explorer, KEY, body=body))
    assert status == 400
    assert sentence in message


def test_unknown_policies_and_actions_are_not_found(explorer: RunningExplorer) -> None:
    assert refusal(ask(explorer, KEY, "/none/pause", {}))[:2] == (404, "policy_not_found")
    assert refusal(ask(explorer, KEY, "/default/burn", {}))[:2] == (404, "not_found")


def test_an_administrator_of_a_tenant_has_its_own_policies(explorer: RunningExplorer) -> None:
    acme, umbra = (admin_of(explorer, tenant) for tenant in ("acme", "umbra"))
    eventually(lambda: ask(explorer, umbra).status_code == 200)  # a new key is known a moment later
    assert ask(explorer, acme, body={"name": "chat"}).json()["tenant"] == "acme"
    assert ask(explorer, umbra, body={"name": "chat"}).json()["tenant"] == "umbra"
    assert ask(explorer, umbra, body={"name": "mail"}).status_code == 200
    assert names(explorer, acme) == ["default", "chat"]
    assert refusal(ask(explorer, acme, "/mail/pause", {}))[:2] == (404, "policy_not_found")
    assert refusal(ask(explorer, acme, "/default/pause", {}))[0] == 403
    assert refusal(ask(explorer, acme, body={"name": "x", "tenant": "umbra"}))[0] == 403
    assert ask(explorer, acme, "/chat/delete", {"tenant": "umbra"}).status_code == 200
    left = [(each.tenant, each.name) for each in explorer.ledger.policies.all()]
    assert left[1:] == [("umbra", "chat"), ("umbra", "mail")]


def test_the_page_has_a_line_a_policy(explorer: RunningExplorer) -> None:
    ask(explorer, KEY, body={"name": "support", "tenant": "acme"})
    explorer.http.post("/ui/login", data={"key": KEY})
    page = explorer.http.get("/ui/policies").text
    assert '<a href="/ui/versions?policy=acme/support">support</a>' in page
    assert "Versions of support" in explorer.http.get("/ui/versions?policy=acme/support").text
    assert explorer.http.get("/ui/versions?policy=none").status_code == 404


def test_a_key_is_made_for_a_policy(explorer: RunningExplorer) -> None:
    ask(explorer, KEY, body={"name": "support"})
    headers = {"authorization": f"Bearer {KEY}"}
    made = explorer.http.post("/admin/keys", headers=headers, json={"name": "web", "policy": "support"}).json()
    assert made["policy"] == explorer.ledger.policies.find("support").id
    refused = explorer.http.post("/admin/keys", headers=headers, json={"name": "web", "policy": "none"})
    assert refusal(refused)[:2] == (400, "policy_refused")
