"""Scores on Langfuse's wire: what they are about, what they count as, what corrects and what deletes them."""

import gzip
import hashlib
import json
from typing import Any

import httpx
import pytest

from tests.doubles.engine import CHAT
from tests.explorer.feedback.test_routes import ok, reply_id, rewards
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tuneloop.explorer.feedback import score_routes
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant

pytestmark = pytest.mark.contract

THUMB = {"name": "user-feedback", "value": 1, "dataType": "BOOLEAN"}


def score(explorer: RunningExplorer, trace: str | None, **but: Any) -> httpx.Response:
    return explorer.http.post(score_routes.SCORES, json=THUMB | {"traceId": trace} | but)


def unscore(explorer: RunningExplorer, name: str) -> int:
    return explorer.http.delete(f"{score_routes.SCORES}/{name}").status_code


def ask(explorer: RunningExplorer, headers: dict[str, str] | None = None, **but: Any) -> str:
    answer = explorer.http.post(CHAT, json=HELLO | but, headers=headers or {})
    found: str = answer.json()["id"]
    return found


def test_a_thumb_on_a_reply_counts_is_corrected_and_taken_back(explorer: RunningExplorer) -> None:
    said = reply_id(explorer)
    told = ok(score(explorer, said, id="s-1", comment="good"))
    assert (told["id"], told["outcomes"]) == ("s-1", {said: "accepted"})
    assert rewards(explorer) == [1.0]
    ok(score(explorer, said, id="s-1", comment="good"))
    ok(score(explorer, said, id="s-1", value=0))
    assert rewards(explorer) == [0.0], "the same id is the same score"
    assert unscore(explorer, "s-1") == 204
    assert rewards(explorer) == [None]
    assert (unscore(explorer, "s-1"), unscore(explorer, "s-2")) == (404, 404)
    ok(score(explorer, said, id="s-1"))
    assert rewards(explorer) == [1.0]
    assert ok(score(explorer, said))["id"], "an id of ours"
    assert ok(score(explorer, "guess", observationId=said))["outcomes"] == {said: "accepted"}


def test_librechats_thumbs_reach_the_reply_of_their_message(explorer: RunningExplorer) -> None:
    """Its traces are digests of messages' ids, which its custom endpoints can send as a header."""
    message = "6f1f7a52-1a4b-4d0c-8a54-0d8f0d6b9f11"
    ask(explorer, {"x-request-id": message}), ask(explorer)
    trace = hashlib.sha256(message.encode()).hexdigest()[:32]
    body = {
        **{"id": f"feedback-{trace}", "traceId": trace, "name": "user-feedback", "value": 0, "dataType": "BOOLEAN"},
        **{"comment": "not_matched — wrong", "metadata": {"rating": "thumbsDown", "tag": "not_matched"}},
        "environment": "production",
    }
    ok(explorer.http.post(score_routes.SCORES, json=body))
    assert rewards(explorer) == [0.0, None]
    assert explorer.rows("SELECT text FROM feedback WHERE kind = 'comment'") == [("not_matched — wrong",)]
    assert unscore(explorer, f"feedback-{trace}") == 204
    assert rewards(explorer) == [None, None]


@pytest.mark.parametrize(
    ("headers", "metadata", "trace"),
    [
        ({"x-request-id": "Message 7"}, {}, "Message 7"),
        (
            {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
            {},
            "0af7651916cd43dd8448eb211c80319c",
        ),
        (
            {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
            {},
            "0AF7651916CD43DD8448EB211C80319C",
        ),
        ({"x-request-id": "0af7651916cd43dd8448eb211c80319c"}, {}, "0af7651916cd43dd8448eb211c80319c"),
        ({}, {"trace_id": "chat/7"}, "chat/7"),
        ({}, {"task_id": "t", "run_id": "r-9"}, "r-9"),
        ({}, {"task_id": "t", "run_id": "r-9"}, "t/r-9"),
        ({"x-request-id": "a"}, {"trace_id": "b"}, "b"),
        ({"x-request-id": "a"}, {"trace_id": "b"}, "a"),
    ],
)
def test_a_trace_is_what_its_requests_carried(
    explorer: RunningExplorer, headers: dict[str, str], metadata: dict[str, str], trace: str
) -> None:
    ask(explorer, headers, metadata=metadata), ask(explorer, headers, metadata=metadata), ask(explorer)
    ok(score(explorer, trace))
    assert rewards(explorer) == [1.0, 1.0, None]


def test_any_endpoints_replies_have_traces_and_keep_them_when_relabelled(explorer: RunningExplorer) -> None:
    headers = {"x-request-id": "m"}
    message = {"model": HELLO["model"], "max_tokens": 12, "messages": HELLO["messages"]}
    assert explorer.http.post("/v1/messages", json=message, headers=headers).status_code == 200
    said = ask(explorer, headers, store=True)
    explorer.until_flushed()
    ok(explorer.http.post(f"{CHAT}/{said}", json={"metadata": {"topic": "x"}}))
    ok(score(explorer, "m"))
    assert rewards(explorer) == [1.0, 1.0]
    assert explorer.http.delete(f"{CHAT}/{said}").status_code == 200
    assert explorer.rows("SELECT count(*) FROM tags") == [(1,)], "what names a deleted reply goes with it"


@pytest.mark.parametrize(
    ("but", "events"),
    [
        ({"dataType": "NUMERIC", "value": 0.25}, [("number", "reward", 0.25, None)]),
        ({"dataType": None, "value": 3}, [("number", "reward", 3.0, None)]),
        ({"dataType": None, "value": True}, [("boolean", "reward", 1.0, None)]),
        ({"value": 1.0, "comment": ""}, [("boolean", "reward", 1.0, None)]),
        ({"name": "tone", "value": "kind", "dataType": "CATEGORICAL"}, [("label", "tone", None, "kind")]),
        ({"name": "tone", "value": "kind", "dataType": None}, [("label", "tone", None, "kind")]),
        ({"name": "helpful", "value": 0.5, "dataType": "NUMERIC"}, [("number", "helpful", 0.5, None)]),
        ({"value": "nice", "dataType": "TEXT", "comment": "and"}, [("comment", "comment", None, "nice\nand")]),
        ({"value": "Monday.", "dataType": "CORRECTION"}, [("demonstration", "demonstration", None, "Monday.")]),
    ],
)
def test_what_each_type_counts_as(explorer: RunningExplorer, but: dict[str, Any], events: list[Any]) -> None:
    told = ok(score(explorer, reply_id(explorer), **but))
    assert explorer.rows("SELECT kind, metric, value, text FROM feedback") == events
    assert told.get("not_counted", []) == [each[1] for each in events if each[1] in {"tone", "helpful"}]


@pytest.mark.parametrize(
    ("but", "param"),
    [
        ({"value": 2}, "value"),
        ({"value": "1"}, "value"),
        ({"value": None}, "value"),
        ({"value": "x", "dataType": "NUMERIC"}, "value"),
        ({"value": 1, "dataType": "CATEGORICAL"}, "value"),
        ({"value": 1, "dataType": "STARS"}, "value"),
        ({"name": None}, "name"),
        ({"name": 7}, "name"),
        ({"traceId": None, "sessionId": "s"}, "traceId"),
        ({"traceId": 7}, "traceId"),
        ({"traceId": "guess"}, "traceId"),
        ({"id": "x" * 300}, "id"),
    ],
)
def test_what_is_no_score_is_refused_and_stored_nowhere(
    explorer: RunningExplorer, but: dict[str, Any], param: str
) -> None:
    answer = score(explorer, but.pop("traceId", reply_id(explorer)), **but)
    assert answer.status_code == (404 if "guess" in str(answer.request.content) else 400)
    assert answer.json()["error"]["param"] == param
    assert explorer.rows("SELECT count(*) FROM feedback") == [(0,)]


def test_a_reply_that_was_not_recorded_is_no_success(explorer: RunningExplorer) -> None:
    answer = score(explorer, reply_id(explorer, store=False))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_stored")


def test_a_list_is_answered_as_langfuse_answers_it(explorer: RunningExplorer) -> None:
    first, second = reply_id(explorer), reply_id(explorer)
    both = [THUMB | {"traceId": first}, THUMB | {"traceId": second, "value": 0}]
    answer = explorer.http.post(score_routes.SCORES, json=both)
    assert (answer.status_code, answer.json()) == (202, {"message": "Accepted"})
    assert rewards(explorer) == [1.0, 0.0]
    answer = explorer.http.post(score_routes.SCORES, json=[*both, THUMB | {"traceId": "guess"}, 7])
    told = answer.json()
    assert (answer.status_code, told["accepted"], told["rejected"]) == (207, 2, 2)
    assert told["errors"][0]["message"].startswith("guess is neither the id of a reply")
    many = explorer.http.post(score_routes.SCORES, json=[both[0]] * (score_routes.MAX_SCORES + 1))
    assert many.status_code == 413


def test_a_batch_keeps_its_scores_and_says_what_it_does_not_keep(explorer: RunningExplorer) -> None:
    said = reply_id(explorer)
    body = {"id": "s", "traceId": said, "name": "user-feedback", "value": 1.0, "dataType": "BOOLEAN"}
    events = [
        {"id": "e1", "type": "score-create", "timestamp": "2026-11-30T00:00:00Z", "body": body},
        {"id": "e2", "type": "trace-create", "timestamp": "2026-11-30T00:00:00Z", "body": {"id": "t"}},
        {"id": "e3", "type": "score-create", "timestamp": "2026-11-30T00:00:00Z", "body": body | {"traceId": "guess"}},
    ]
    answer = explorer.http.post("/api/public/ingestion", json={"batch": events, "metadata": {}})
    assert (answer.status_code, answer.json()["successes"]) == (207, [{"id": "e1", "status": 201}])
    errors = answer.json()["errors"]
    assert [(each["id"], each["status"]) for each in errors] == [("e2", 400), ("e3", 404)]
    assert errors[0]["message"] == "trace-create was not kept: only scores are kept here"
    assert rewards(explorer) == [1.0]
    assert explorer.http.post("/api/public/ingestion", json={}).status_code == 400
    traces = explorer.http.post("/api/public/otel/v1/traces", content=b"")
    assert (traces.status_code, "only its scores" in traces.text) == (404, True)


def test_what_was_acknowledged_outlives_an_outage(explorer: RunningExplorer) -> None:
    said = ask(explorer, {"x-request-id": "m"})
    explorer.until_flushed()
    explorer.ledger.recording.away = True
    assert ok(score(explorer, said, id="early"))["outcomes"] == {said: "pending"}
    assert unscore(explorer, "early") == 503
    assert score(explorer, "m").status_code == 503
    explorer.ledger.recording.away = False
    eventually(lambda: rewards(explorer) == [1.0])


def test_bodies_are_read_in_every_encoding_and_no_other(explorer: RunningExplorer) -> None:
    said = reply_id(explorer)
    for path, body in {
        score_routes.SCORES: THUMB | {"traceId": said},
        "/api/public/ingestion": {"batch": [{"id": "e", "type": "score-create", "body": THUMB | {"traceId": said}}]},
    }.items():
        packed = gzip.compress(json.dumps(body).encode())
        answer = explorer.http.post(path, content=packed, headers={"content-encoding": "gzip"})
        assert answer.status_code in {200, 207}, answer.text
        refused = explorer.http.post(path, content=packed, headers={"content-encoding": "br"})
        assert (refused.status_code, "br" in refused.json()["error"]["message"]) == (415, True)
    assert rewards(explorer) == [1.0]


def test_langfuses_two_keys_are_one_of_ours(explorer: RunningExplorer) -> None:
    said = reply_id(explorer)
    grants = {
        "librechat": frozenset({Scope.FEEDBACK}),
        "agent": frozenset({Scope.INFERENCE}),
        "other": frozenset({Scope.FEEDBACK}),
    }
    keys = {}
    for name, scopes in grants.items():
        tenant = "acme" if name == "other" else "default"
        keys[name] = explorer.ledger.keys.create(KeyGrant(name=name, scopes=scopes, tenant=tenant), actor="test")[1]
    send = {"url": score_routes.SCORES, "json": THUMB | {"traceId": said, "id": "s"}}
    eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
    assert explorer.http.post(**send, auth=("pk-lf-any", "guess")).status_code == 401
    assert explorer.http.post(**send, auth=("pk-lf-any", keys["agent"])).status_code == 403
    assert explorer.http.post(**send, auth=("pk-lf-any", keys["other"])).status_code == 404, "another tenant's reply"
    assert explorer.http.post(**send, auth=(keys["librechat"], "")).status_code == 200
    assert explorer.http.post(**send, auth=("pk-lf-any", keys["librechat"])).status_code == 200
    assert explorer.http.post(**send, headers={"authorization": "Basic !!"}).status_code == 401
    delete = f"{score_routes.SCORES}/s"
    assert explorer.http.delete(delete, auth=("pk", keys["other"])).status_code == 404
    assert explorer.http.delete(delete, auth=("pk", keys["librechat"])).status_code == 204
    assert {row[0] for row in explorer.rows("SELECT source FROM feedback")} == {"key:librechat/score:s"}
