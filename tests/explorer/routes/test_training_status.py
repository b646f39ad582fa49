"""GET /training: whether a program that drives the training may go on."""

from dataclasses import replace
from typing import Any

import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.checkpoints import register
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.factories import exchange, feedback
from tuneloop.explorer.routes.training_status import _status, is_settled
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.facts import HeldBack, LedgerFacts, Rules, StateCount, Weights
from tuneloop.shared.outbox_status import OutboxStatus

pytestmark = pytest.mark.contract


def facts(committed: int = 0, leased: int = 0, claimable: int = 0, newest: int = 3, rejected: int = 0) -> LedgerFacts:
    return LedgerFacts(
        states={State.COMMITTED: StateCount(committed), State.LEASED: StateCount(leased)},
        claimable=claimable,
        weights=Weights(newest, 0.0, 2, newest, rejected, None, servable=newest - rejected),
    )


PARTLY, WHOLE = Rules(8), Rules(8, batch_timeout=1.0)


@pytest.mark.parametrize(
    ("known", "rules", "looked_at", "settled"),
    [
        (facts(), PARTLY, True, True),
        (facts(), WHOLE, False, True),
        (facts(newest=4), WHOLE, True, False),
        (facts(newest=4, rejected=1), WHOLE, True, True),
        (facts(committed=3), WHOLE, True, False),
        (facts(leased=1), WHOLE, True, False),
        (facts(committed=3, claimable=3), PARTLY, True, True),
        (facts(committed=3), PARTLY, False, False),
        (facts(committed=9, claimable=8), PARTLY, True, False),
        (facts(committed=1, leased=7), PARTLY, True, True),
        (facts(leased=8), PARTLY, True, False),
        (facts(leased=8), PARTLY._replace(save_interval=2), True, True),
        (replace(facts(committed=9, claimable=8), held_back=(HeldBack("acme", "ann", 8),)), PARTLY, True, True),
    ],
)
def test_it_is_settled_when_nothing_comes_of_what_is_there(
    known: LedgerFacts, rules: Rules, looked_at: bool, settled: bool
) -> None:
    assert is_settled(known, rules, [3], looked_at=looked_at) is settled


def test_a_version_that_some_engine_does_not_serve_yet_is_to_come() -> None:
    assert not is_settled(facts(), WHOLE, [2, 3], looked_at=True)
    assert not is_settled(facts(), WHOLE, [], looked_at=True)


def test_the_calls_of_a_run_are_counted(explorer: RunningExplorer) -> None:
    for run_id in (1, 1, 2):
        explorer.chat(metadata={"task_id": "a", "run_id": run_id})
    query = {"task_id": "a", "run_id": "1"}
    assert explorer.http.get("/training/calls", params=query).json() == {"calls": 2}
    assert explorer.http.get("/training/calls", params=query | {"run_id": "3"}).json() == {"calls": 0}
    assert explorer.http.get("/training/calls", params={"task_id": "a"}).json()["error"]["param"] == "run_id"


def test_the_tokens_of_a_run_are_counted(explorer: RunningExplorer) -> None:
    for _ in range(2):
        explorer.chat(metadata={"task_id": "a", "run_id": "1"})
    counts = explorer.http.get("/training/calls", params={"task_id": "a", "run_id": "1", "tokens": "true"}).json()
    kept = [each.experiences[0] for each in explorer.exchanges()]
    said = sum(len(each.completion_ids) for each in kept) // 4
    tokens = sum(len(each.prompt_ids) for each in kept) // 4 + said
    assert counts.pop("breaks") == ["turn 2 asks the same as turn 1"]
    assert counts == {"calls": 2, "tokens": tokens, "completion_tokens": said, "sequences": 2, "merged_tokens": tokens}


def test_the_route_says_what_the_training_does(explorer: RunningExplorer) -> None:
    def status() -> Any:
        return explorer.http.get("/training").json()

    first = status()
    assert (first["served"], first["newest"], first["settled"], first["trainer_up"]) == (0, 0, True, False)
    assert first["reasons"][0].keys() == {"code", "sentence"}
    explorer.feedback(explorer.chat().json()["id"])
    explorer.commit()
    assert (status()["experiences"]["committed"], status()["settled"]) == (1, False)
    register(explorer.ledger, explorer.settings.job_dir)
    eventually(lambda: status()["served"] == 1)
    assert status()["newest"] == 1


def test_a_version_registered_while_the_ledger_is_read_is_not_settled(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, settings = explorer.ledger, explorer.settings
    arguments = (settings, ledger, ledger.policies.get(0), [0], OutboxStatus(), None, ())
    assert _status(*arguments)["settled"]
    counted = {State.COMMITTED: 0, State.LEASED: 0}
    monkeypatch.setattr(ledger.policies, "in_training", lambda *_: register(ledger, settings.job_dir) and counted)
    assert not _status(*arguments)["settled"]


def test_whose_feedback_a_share_holds_back_is_told_by_name_and_counted(explorer: RunningExplorer) -> None:
    """Ten raters with one reply each, ninety replies of one more, and batches of 32."""
    said = [exchange() for _ in range(100)]
    names = [f"rater-{number}" if number < 10 else "flood" for number in range(100)]
    heard = [feedback(msg_id=each.msg_id, source=name) for each, name in zip(said, names, strict=True)]
    explorer.ledger.recording.record([*said, *heard])
    explorer.ledger.recording.commit("acme")
    explorer.ledger.training.take_epoch("host:1")
    [reason] = explorer.http.get("/training").json()["reasons"]
    assert reason["code"] == "rater_share"
    assert "flood (acme) 87." in reason["sentence"]
    eventually(lambda: "\ntuneloop_held_back 87.0\n" in explorer.http.get("/metrics").text)


# `GET /v1/chat/completions/{id}/explain` and the section of the page.


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
