"""`GET /v1/chat/completions/{id}/explain` and the section of the page."""

import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually

pytestmark = pytest.mark.contract


def test_a_reply_of_each_route_is_explained_by_its_id(explorer: RunningExplorer) -> None:
    prompt = [{"role": "user", "content": "3+4="}]
    bodies = {
        "/v1/chat/completions": {"messages": prompt},
        "/v1/responses": {"input": "3+4="},
        "/v1/messages": {"messages": prompt, "max_tokens": 8},
    }
    for path, body in bodies.items():
        sampled = explorer.http.post(path, json={"model": MODEL, **body})
        assert sampled.status_code == 200, (path, sampled.text)
        reply_id = sampled.json()["id"]
        explorer.feedback(reply_id, reward=0.5)
        answer = explorer.http.get(f"/v1/chat/completions/{reply_id}/explain")
        assert answer.status_code == 200, answer.text
        [reply] = answer.json()["replies"]
        assert (answer.json()["id"], reply["reward"], reply["parts"]) == (reply_id, 0.5, {"reward": 0.5})
        assert [each["code"] for each in reply["waits_for"]] == ["not_committed"]
        assert f"came to {path} at" in answer.json()["sentences"][0]


def test_the_page_of_an_exchange_tells_what_happened_to_it(explorer: RunningExplorer) -> None:
    reply_id = explorer.chat().json()["id"]
    explorer.until_flushed()
    page = explorer.http.get(f"/ui/exchanges/{reply_id}").text
    assert "What happened to it" in page
    assert f"/ui/exchanges/{reply_id}/explain" in page
    assert "no feedback on it counts" in explorer.http.get(f"/ui/exchanges/{reply_id}/explain").text


def test_an_id_that_the_ledger_does_not_have_is_404_with_the_reason(explorer: RunningExplorer) -> None:
    reply_id = explorer.chat().json()["id"]
    explorer.until_flushed()
    assert explorer.http.delete(f"/v1/chat/completions/{reply_id}").status_code == 200
    for each, why in ((reply_id, "was deleted at"), ("chatcmpl-none", "the ledger has no reply")):
        answer = explorer.http.get(f"/v1/chat/completions/{each}/explain")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert why in answer.json()["error"]["message"]


def test_it_takes_a_key_that_may_read_and_another_tenants_reply_is_unknown(
    running_explorer: Run, double: EngineDouble
) -> None:
    explorer = running_explorer(double, admin_key="an-admin-key-of-some-length")
    admin = {"authorization": "Bearer an-admin-key-of-some-length"}

    def key(tenant: str, *scopes: str) -> dict[str, str]:
        body = {"name": f"{tenant}-{'-'.join(scopes)}", "tenant": tenant, "scopes": [*scopes]}
        made = explorer.http.post("/admin/keys", json=body, headers=admin)
        assert made.status_code < 300, made.text
        return {"authorization": f"Bearer {made.json()['key']}"}

    asking, reading, other = key("acme", "inference"), key("acme", "read"), key("other", "read")
    eventually(lambda: explorer.chat().status_code == 401)
    eventually(lambda: explorer.http.get("/v1/models", headers=other).status_code == 200)
    reply_id = explorer.http.post("/v1/chat/completions", json=HELLO, headers=asking).json()["id"]
    path = f"/v1/chat/completions/{reply_id}/explain"
    assert explorer.http.get(path, headers=reading).status_code == 200
    assert explorer.http.get(path, headers=asking).status_code == 403
    assert explorer.http.get(path).status_code == 401
    unknown = explorer.http.get("/v1/chat/completions/chatcmpl-none/explain", headers=other)
    answer = explorer.http.get(path, headers=other)
    assert answer.status_code == unknown.status_code == 404
    assert answer.text.replace(reply_id, "chatcmpl-none") == unknown.text
