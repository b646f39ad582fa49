import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tuneloop.shared.experience import State
from tuneloop.shared.job_marks import committed_stamp

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
