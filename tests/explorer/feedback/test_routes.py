"""Feedback and commits over the wire: what reaches a reply, what is told of it, and what is released."""

import gzip
import hashlib
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tuneloop.explorer.feedback import score_routes
from tuneloop.shared.experience import Scope, State
from tuneloop.shared.job_marks import committed_stamp
from tuneloop.shared.ledger.keys import KeyGrant

pytestmark = pytest.mark.contract

_SAFE = "what was acknowledged is safe on disk: commit again later"


def reply_id(explorer: RunningExplorer, **but: object) -> str:
    found: str = explorer.chat(**but).json()["id"]
    return found


def rewards(explorer: RunningExplorer) -> list[float | None]:
    return [row[0] for row in explorer.rows("SELECT reward FROM experiences ORDER BY id")]


def ok(reply: httpx.Response) -> dict[str, object]:
    assert reply.status_code == 200, reply.text
    found: dict[str, object] = reply.json()
    return found


def test_a_reward_reaches_its_reply_and_a_commit_releases_it(explorer: RunningExplorer) -> None:
    first, second = reply_id(explorer), reply_id(explorer)
    said = ok(explorer.feedback(first, reward=0.5))
    assert said["status"] == "success"
    assert (said["accepted"], said["outcomes"]) == (1, {first: "accepted"})
    assert explorer.counts() | {State.REWARDED: 1, State.RECORDED: 1} == explorer.counts()
    assert ok(explorer.commit()) == {"status": "success", "committed": 1}
    assert ok(explorer.commit()) == {"status": "success", "committed": 0}
    assert rewards(explorer) == [0.5, None]
    assert ok(explorer.feedback(second))["accepted"] == 1
    assert ok(explorer.commit())["committed"] == 1


def test_trinitys_own_client_is_understood(explorer: RunningExplorer) -> None:
    said = reply_id(explorer)
    assert ok(explorer.http.post("/feedback", json={"reward": 1, "msg_ids": [said], "task_id": "0a1b2c"}))
    assert ok(explorer.http.post("/feedback", json={"reward": 1, "msg_ids": [said], "task_id": "0a1b2c", "run_id": 0}))
    assert ok(explorer.http.post("/commit"))["status"] == "success"
    assert explorer.http.get("/health").status_code == 200


def test_agentscope_java_is_understood(explorer: RunningExplorer) -> None:
    headers = {"Authorization": "Bearer dummy", "User-Agent": "agentscope-java/2.0.3"}
    said = explorer.http.post(CHAT, json=HELLO | {"stream": False}, headers=headers).json()["id"]
    body = {"msg_ids": [said], "reward": 0.8, "task_id": "task-1", "run_id": "0"}
    utf8 = {"Content-Type": "application/json; charset=utf-8"}
    assert ok(explorer.http.post("/feedback", json=body, headers=utf8))["status"] == "success"
    nulls = {"task_id": None, "run_id": None, "time_threshold": None}
    assert ok(explorer.http.post("/commit", json=nulls, headers=utf8))["committed"] == 1
    event = explorer.feedbacks()[0]
    assert (event.task_id, event.run_id, event.value) == ("task-1", "0", 0.8)


def test_a_reply_and_each_of_its_choices_have_names(explorer: RunningExplorer) -> None:
    said = reply_id(explorer, n=2)
    assert ok(explorer.feedback(said, f"{said}:1", f"{said}:1"))["accepted"] == 2
    explorer.feedback(f"{said}:0", reward=0.25)
    assert rewards(explorer) == [0.25, 1.0]


def test_the_same_feedback_twice_counts_once(explorer: RunningExplorer) -> None:
    said = reply_id(explorer)
    asking = [threading.Thread(target=explorer.feedback, args=(said,)) for _ in range(6)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert ok(explorer.commit())["committed"] == 1
    assert explorer.counts()[State.COMMITTED] == 1


def test_a_correction_wins_also_after_the_commit(explorer: RunningExplorer) -> None:
    said = reply_id(explorer)
    explorer.feedback(said, reward=0)
    explorer.feedback(said, reward=1)
    assert rewards(explorer) == [1.0]
    explorer.commit()
    explorer.feedback(said, reward=-1)
    assert rewards(explorer) == [-1.0]
    assert explorer.counts()[State.COMMITTED] == 1


def test_a_commit_may_name_a_task_a_run_or_a_time(explorer: RunningExplorer) -> None:
    ids = [reply_id(explorer, metadata={"task_id": "a", "run_id": run}) for run in (1, "2", 3)]
    explorer.feedback(*ids)
    assert ok(explorer.commit(time_threshold=0))["committed"] == 0
    assert ok(explorer.commit(time_threshold="2001-01-01T00:00:00"))["committed"] == 0
    assert ok(explorer.commit(task_id="b"))["committed"] == 0
    assert ok(explorer.commit(task_id="a", run_id=1))["committed"] == 1
    assert ok(explorer.commit(run_id="2"))["committed"] == 1
    assert ok(explorer.commit(time_threshold=datetime.now(UTC).isoformat()))["committed"] == 1


def test_a_trainer_is_told_of_what_is_committed_and_of_nothing_else(explorer: RunningExplorer) -> None:
    job_dir = explorer.settings.job_dir
    assert (ok(explorer.commit())["committed"], committed_stamp(job_dir)) == (0, 0)
    explorer.feedback(reply_id(explorer))
    assert ok(explorer.commit())["committed"] == 1
    assert (stamp := committed_stamp(job_dir)) > 0
    assert (ok(explorer.commit())["committed"], committed_stamp(job_dir)) == (0, stamp)


def test_a_commit_may_name_several_tasks(explorer: RunningExplorer) -> None:
    explorer.feedback(*[reply_id(explorer, metadata={"task_id": task, "run_id": 1}) for task in "abcd"])
    assert ok(explorer.commit(task_ids=[]))["committed"] == 0
    assert ok(explorer.commit(task_ids=["a", "c", "unknown"]))["committed"] == 2
    assert ok(explorer.commit(task_ids=["b"], run_id="2"))["committed"] == 0
    assert explorer.commit(task_ids="a").json()["error"]["param"] == "task_ids"
    assert explorer.commit(task_ids=["a"] * 10_001).status_code == 413
    assert ok(explorer.commit())["committed"] == 2


def test_feedback_and_commit_right_after_a_stream_find_the_reply(explorer: RunningExplorer) -> None:
    for _ in range(20):
        with explorer.http.stream("POST", CHAT, json=HELLO | {"stream": True}) as reply:
            lines = [line for line in reply.iter_lines() if "chatcmpl" in line]
        said = lines[0].split('"id":"')[1].split('"')[0]
        explorer.feedback(said)
        assert ok(explorer.commit())["committed"] == 1


def test_feedback_on_what_cannot_be_trained_on_is_kept_but_not_committed(explorer: RunningExplorer) -> None:
    said = reply_id(explorer, metadata={"train": "false"})
    explorer.feedback(said)
    assert ok(explorer.commit())["committed"] == 0
    assert rewards(explorer) == [1.0]
    assert explorer.counts()[State.DROPPED] == 1


def test_while_the_database_is_away_everything_is_taken_but_a_commit(
    running_explorer: Run, double: EngineDouble
) -> None:
    explorer = running_explorer(double)
    explorer.ledger.recording.away = True
    ids = [reply_id(explorer) for _ in range(5)]
    assert ok(explorer.feedback(*ids))["outcomes"] == dict.fromkeys(ids, "pending")
    refused = explorer.commit()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "database_unavailable")
    assert refused.json()["status"] == "error"
    assert int(refused.headers["retry-after"]) >= 1
    assert explorer.http.get("/health/ready").status_code == 200
    explorer.ledger.recording.away = False
    eventually(lambda: explorer.commit().status_code == 200)
    assert explorer.counts()[State.COMMITTED] == 5


def test_why_a_commit_is_put_off_is_logged(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    with capture_logs() as logs:
        explorer.ledger.recording.away = True
        assert explorer.commit().status_code == 503
        explorer.chat()
        assert explorer.commit().status_code == 503
    reasons = [each["reason"] for each in logs if each["event"] == "commit_put_off"]
    assert reasons == ["away", "the database is away, or still behind; " + _SAFE]


def test_a_full_outbox_refuses_with_a_time_to_come_back(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, outbox_max_bytes=2000)
    explorer.ledger.recording.away = True
    said = reply_id(explorer)
    while (reply := explorer.chat()).status_code == 200:
        pass
    for refused in (reply, explorer.feedback(said), explorer.chat(stream=True)):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1
    ready = explorer.http.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "not_ready")
    assert "outbox" in ready.json()["reason"]
    assert explorer.http.get("/health/live").status_code == 200
    for stream in (False, True):
        assert explorer.chat(store=False, stream=stream).status_code == 200, "what is not kept needs no room"
    explorer.ledger.recording.away = False
    eventually(lambda: explorer.chat().status_code == 200)
    ready = explorer.http.get("/health/ready").json()
    assert (ready["status"], ready["reason"]) == ("ready", None)


def test_a_database_that_is_away_for_too_long_is_no_longer_waited_for(
    running_explorer: Run, double: EngineDouble
) -> None:
    explorer = running_explorer(double, outbox_max_age=0.5)
    explorer.ledger.recording.away = True
    said = reply_id(explorer)
    eventually(lambda: explorer.chat().status_code == 503)
    refused = explorer.feedback(said)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_full")
    assert "0.5 seconds" in refused.json()["error"]["message"]
    assert explorer.http.get("/health/ready").status_code == 503
    assert explorer.metrics()["tuneloop_outbox_oldest_seconds"] > 0.5
    explorer.ledger.recording.away = False
    eventually(lambda: explorer.chat().status_code == 200)
    explorer.until_flushed()
    assert ok(explorer.feedback(said))["accepted"] == 1


def test_a_stream_that_cannot_be_stored_ends_with_an_error(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.piece_pause_s = 0.02
    explorer.chat()  # so that a file is open
    outbox = explorer.services.outbox
    with explorer.http.stream("POST", CHAT, json=HELLO | {"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        with Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), outbox._open._descriptor)
        rest = list(lines)
    assert not [line for line in rest if "[DONE]" in line]
    assert '"code":"storage_full"' in rest[-2]


@pytest.mark.parametrize("count", [1000, 10_000])
def test_many_ids_in_one_call_are_taken(explorer: RunningExplorer, count: int) -> None:
    said = reply_id(explorer)
    assert ok(explorer.feedback(*[said] * count))["accepted"] == 1


STRICT = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
FORCED = {"type": "function", "function": {"name": "add"}}


def test_the_answer_says_what_the_policy_is_not_trained_on(explorer: RunningExplorer) -> None:
    strict = reply_id(explorer, tools=[STRICT])
    forced = reply_id(explorer, tools=[STRICT], tool_choice=FORCED)
    opted_out = reply_id(explorer, metadata={"train": False})
    plain = reply_id(explorer)
    said = ok(explorer.feedback(strict, f"{forced}:0", opted_out, plain))
    assert said["not_trained"] == {
        strict: "sampling:tools",
        f"{forced}:0": "sampling:tool_choice",
        opted_out: "opt_out",
    }
    assert "not_trained" not in ok(explorer.feedback(plain, reward=0.5))


def test_a_method_that_learns_from_any_reply_leaves_none_of_them_out(
    running_explorer: Run, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = running_explorer(double)
    monkeypatch.setattr(explorer.ledger.recording, "_any_reply", True)
    assert "not_trained" not in ok(explorer.feedback(reply_id(explorer, tools=[STRICT])))


def test_the_answer_names_the_metrics_that_count_for_nothing(explorer: RunningExplorer) -> None:
    msg_id = reply_id(explorer)
    rated = {"msg_ids": [msg_id], "value": 4, "metric": "rating", "comment": "good", "label": "kind"}
    assert ok(explorer.http.post("/feedback", json=rated))["not_counted"] == ["label", "rating"]
    assert "not_counted" not in ok(explorer.feedback(msg_id))
    refused = explorer.http.post("/feedback", json={"msg_ids": [msg_id], "reward": 1, "rating": 4})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "rating")


def test_a_call_brings_one_reply_no_more_than_a_hundred_events(explorer: RunningExplorer) -> None:
    """Ten thousand sources in one call kept the database busy for 71 s."""
    said, other = (explorer.chat().json()["id"] for _ in range(2))
    entries = [{"msg_ids": [said], "reward": 1, "source": f"name-{number}"} for number in range(101)]
    refused = explorer.http.post("/feedback", json={"feedback": entries})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_many_events")
    of_a_run = [{"task_id": "t", "run_id": "r"} | entry | {"msg_ids": None} for entry in entries]
    assert explorer.http.post("/feedback", json={"feedback": of_a_run}).status_code == 413
    entries[100]["msg_ids"] = [other]
    assert explorer.http.post("/feedback", json={"feedback": entries}).status_code == 200


# Scores on Langfuse's wire: what they are about, what they count as, what corrects and what deletes them.


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
        refused = explorer.http.post(path, content=packed, headers={"content-encoding": "lzma"})
        assert (refused.status_code, "lzma" in refused.json()["error"]["message"]) == (415, True)
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
