"""What an explorer says of itself: health, metrics, curves, for programs and Trinity's clients."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.checkpoints import register
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.house.sources import ROOT
from tests.trainer.factories import points
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Alarm

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
NAMES = [family.name for family in Metrics().registry.collect()]


def test_live_and_ready_are_two_questions(explorer: RunningExplorer, double: EngineDouble) -> None:
    assert explorer.http.get("/health").json() == {"status": "live"}
    ready = explorer.http.get("/health/ready").json()
    assert (ready["status"], ready["reason"]) == ("ready", None)
    [engine] = ready["engines"]
    assert (engine["engine"], engine["state"], engine["version"]) == (0, "ready", 0)
    double.dead = True
    eventually(lambda: explorer.http.get("/health/ready").status_code == 503)
    reason = explorer.http.get("/health/ready").json()["reason"]
    assert reason.startswith("no engine is ready: see the explorer's log, and whether their hosts are reached")
    assert explorer.http.get("/health/live").status_code == 200
    double.dead = False
    eventually(lambda: explorer.http.get("/health/ready").status_code == 200)


def test_a_database_that_is_away_is_no_reason_not_to_be_ready(explorer: RunningExplorer) -> None:
    explorer.ledger.recording.away = True
    assert explorer.chat().status_code == 200
    assert explorer.http.get("/health/ready").status_code == 200
    eventually(lambda: explorer.metrics()["tuneloop_database_up"] == 0)
    explorer.ledger.recording.away = False
    eventually(lambda: explorer.metrics()["tuneloop_database_up"] == 1)


def test_a_database_that_refuses_is_a_reason_not_to_be_ready_and_an_alarm(explorer: RunningExplorer) -> None:
    explorer.ledger.recording.forbids = True
    reply = explorer.chat()
    assert reply.status_code == 200
    assert explorer.feedback(reply.json()["id"]).json()["counts"]["pending"] == 1
    eventually(lambda: explorer.http.get("/health/ready").status_code == 503)
    assert "permission denied for table" in explorer.http.get("/health/ready").json()["reason"]
    eventually(lambda: [alarm.name for alarm in explorer.ledger.alarms.all()] == ["database_refuses"])
    assert "permission denied" in explorer.ledger.alarms.all()[0].reason
    eventually(lambda: explorer.metrics().get("tuneloop_alarm") == 1)
    explorer.ledger.recording.forbids = False
    eventually(lambda: explorer.http.get("/health/ready").status_code == 200)
    eventually(lambda: explorer.ledger.alarms.all() == [])
    explorer.until_flushed()
    assert explorer.ledger.reports.counts()[State.REWARDED] == 1


def test_an_outbox_that_was_moved_away_is_noticed_within_a_second_and_nothing_is_acknowledged(
    explorer: RunningExplorer,
) -> None:
    reply = explorer.chat().json()["id"]
    elsewhere = explorer.settings.outbox_dir.rename(explorer.settings.outbox_dir.with_name("elsewhere"))
    assert explorer.feedback(reply).status_code == 503
    eventually(lambda: explorer.http.get("/health/ready").status_code == 503, within_s=1.0)
    assert "takes no records" in explorer.http.get("/health/ready").json()["reason"]
    assert explorer.chat().status_code == 503
    elsewhere.rename(explorer.settings.outbox_dir)
    eventually(lambda: explorer.http.get("/health/ready").status_code == 200)
    assert explorer.feedback(reply).status_code == 200


def test_what_the_database_refused_is_an_alarm_until_it_is_put_back(explorer: RunningExplorer) -> None:
    explorer.ledger.recording.refuses = lambda record: True
    explorer.chat()
    eventually(lambda: [alarm.name for alarm in explorer.ledger.alarms.all()] == ["records_refused"])
    assert "tuneloop outbox list" in explorer.ledger.alarms.all()[0].reason
    [refused] = explorer.ledger.recording.refused_records()
    explorer.ledger.recording.delete_refused(refused.file, refused.end_offset)
    eventually(lambda: explorer.ledger.alarms.all() == [])


def test_every_metric_moves(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    explorer.ledger.recording.refuses = lambda record: getattr(record, "task_id", None) == "poison"
    reply = explorer.chat().json()["id"]
    explorer.feedback(reply)
    explorer.chat(metadata={"task_id": "poison"})
    explorer.chat(messages=[{"role": "user", "content": "my key is sk-proj-abcdefgh12345678"}])
    assert explorer.http.get("/v1/models", headers={"Host": "elsewhere.example"}).status_code == 403
    explorer.chat(store=False)
    explorer.commit()
    double.refuses_load_of.add("global_step_1")
    register(explorer.ledger, explorer.settings.job_dir)
    eventually(lambda: explorer.decisions("rejected") == 1)
    register(explorer.ledger, explorer.settings.job_dir)
    eventually(lambda: explorer.version() == 2)
    eventually(lambda: explorer.metrics()["tuneloop_experiences"] > 2)
    eventually(lambda: explorer.metrics()["tuneloop_feedback_to_served_seconds_count"] > 0)
    explorer.ledger.alarms.raise_alarm(Alarm("reply_length", "replies got long"))
    eventually(lambda: explorer.metrics().get("tuneloop_alarm", 0) >= 1)
    found = explorer.metrics()
    assert found["tuneloop_version_served"] == 2
    assert found["tuneloop_requests_total"] >= 3
    assert found["tuneloop_request_seconds_count"] == found["tuneloop_requests_total"]
    assert found["tuneloop_experiences_recorded_total"] == found["tuneloop_requests_total"] - 1  # one is not kept
    assert found["tuneloop_feedback_total"] == 1
    assert found["tuneloop_outbox_refused_total"] == 1
    assert found["tuneloop_reload_seconds_count"] == 1
    assert found["tuneloop_engines"] == 1
    explorer.ledger.recording.away = True
    explorer.chat()
    eventually(lambda: explorer.metrics()["tuneloop_outbox_bytes"] > 0)
    assert explorer.metrics()["tuneloop_outbox_records"] == 1
    eventually(lambda: explorer.metrics()["tuneloop_outbox_oldest_seconds"] > 0)
    explorer.ledger.recording.away = False
    explorer.until_flushed()
    eventually(lambda: explorer.metrics()["tuneloop_outbox_bytes"] == 0)
    assert explorer.metrics()["tuneloop_outbox_oldest_seconds"] == 0
    seen = set(found)

    def untouched() -> set[str]:
        seen.update(explorer.metrics())
        # A pattern of one's own that takes too long is in test_redaction.py.
        names = set(NAMES) - {"tuneloop_patterns_timed_out"}
        return {name for name in names if not any(key.startswith(name) for key in seen)}

    eventually(lambda: not untouched())  # the first probe of an engine takes its time


def test_an_imbalance_of_the_ledger_is_shown(explorer: RunningExplorer) -> None:
    assert explorer.metrics()["tuneloop_ledger_imbalance"] == 0
    version = register(explorer.ledger, explorer.settings.job_dir)
    assert version == 1
    with explorer.ledger.transactions.write() as connection:
        connection.exec_driver_sql("UPDATE versions SET consumed = 7 WHERE version = 1")
    eventually(lambda: explorer.metrics()["tuneloop_ledger_imbalance"] == 1)


def test_what_each_version_earned_is_a_curve(explorer: RunningExplorer) -> None:
    ids = [explorer.chat().json()["id"] for _ in range(3)]
    explorer.feedback(ids[0], reward=1)
    explorer.feedback(ids[1], reward=0)
    folder = explorer.settings.tensorboard_dir / "explorer"
    eventually(lambda: points(folder, "served/reward_mean")[-1:] == [(0, 0.5)])
    assert points(folder, "served/requests")[-1] == (0, 3.0)
    assert points(folder, "served/rewarded")[-1] == (0, 2.0)


def test_every_curve_is_written_down() -> None:
    root = DOCS.parents[1]
    sources = [path.read_text() for service in ("explorer", "trainer") for path in (root / service).rglob("*.py")]
    constants = {node.value for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    named = {each for each in constants if isinstance(each, str) and re.fullmatch(r"[a-z_]+/[a-z_/0-9]*[a-z0-9]", each)}
    curves = {each for each in named if each.partition("/")[0] not in ("application", "image", "text")}
    assert {"served/requests", "drift/alarms"} <= curves
    written = DOCS.read_text()
    assert {curve for curve in curves if f"`{curve}`" not in written} == set()


def test_to_who_comes_from_elsewhere_health_tells_no_version(explorer: RunningExplorer) -> None:
    told = explorer.http.get("/health/ready", headers={"X-Forwarded-For": "203.0.113.9"}).json()
    assert told == {"status": "ready"}
    assert explorer.http.get("/health/ready").json()["engines"]


# Trinity's client.


def test_a_client_of_trinity_reads_its_metrics_as_json(explorer: RunningExplorer) -> None:
    trinity = f"{explorer.url}/trinity"
    assert httpx.get(f"{trinity}/health", timeout=2).status_code == 200
    assert httpx.get(f"{trinity}/v1/models").json()["data"][0]["id"] == MODEL
    replies = [httpx.post(f"{trinity}/v1/chat/completions", json=HELLO).json()["id"] for _ in range(2)]
    said: dict[str, Any] = {"reward": 1.0, "msg_ids": replies[:1], "task_id": "a1b2c3"}
    assert httpx.post(f"{trinity}/feedback", json=said).json()["status"] == "success"
    refused = httpx.post(f"{trinity}/feedback", json=said | {"msg_ids": ["guess"]})
    assert (refused.status_code, refused.json()["status"]) == (404, "error")
    eventually(lambda: httpx.get(f"{trinity}/metrics").json()["rollout/ready_experience_count"] == 1)
    metrics = httpx.get(f"{trinity}/metrics").json()
    assert {
        "rollout/total_experience_count": 2.0,
        "rollout/ready_experience_count": 1.0,
        "rollout/model_0/total_request_count": 2.0,
        "rollout/model_0/model_version": 0.0,
    }.items() <= metrics.items()
    assert metrics['tuneloop_experiences{state="rewarded"}'] == 1.0
    assert httpx.post(f"{trinity}/commit").json()["committed"] == 1


@pytest.mark.parametrize(
    ("accept", "kind"),
    [("application/json", "application/json"), ("*/*", "text/plain"), ("text/plain;version=0.0.4,*/*", "text/plain")],
)
def test_metrics_are_json_for_who_accepts_that_by_name(explorer: RunningExplorer, accept: str, kind: str) -> None:
    reply = explorer.http.get("/metrics", headers={"accept": accept})
    assert reply.headers["content-type"].startswith(kind)


# docs/architectures.md says what differs from the vLLM that is installed.


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="the table is made from vLLM's own routes")
def test_the_table_of_what_differs_from_vllm_is_the_one_that_is_generated() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "vllm_differences.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
