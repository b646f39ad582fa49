from typing import Any

import httpx
import pytest

from tests.doubles.engine import MODEL
from tests.explorer.running import HELLO, RunningExplorer, eventually


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
