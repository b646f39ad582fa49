"""What one key floods the service with keeps nobody else's from the database."""

import time
from pathlib import Path

import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.explorer.feedback import routes
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant

EVENTS = 8_000


def key(explorer: RunningExplorer, name: str, tenant: str = "") -> dict[str, str]:
    grant = KeyGrant(name=name, tenant=tenant or name, scopes=(Scope.INFERENCE, Scope.FEEDBACK, Scope.COMMIT))
    headers = {"Authorization": f"Bearer {explorer.ledger.keys.create(grant, actor='test')[1]}"}
    eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
    eventually(lambda: explorer.http.get("/v1/models", headers=headers).status_code == 200)
    return headers


def test_a_commit_is_answered_while_anothers_flood_is_moved_and_a_stop_does_not_wait_for_it(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path, [double.url])
    with explorer_running(settings) as explorer:
        loud, quiet = key(explorer, "loud"), key(explorer, "quiet")
        explorer.ledger.recording.refuses = lambda record: bool(time.sleep(0.002))  # a database that is not fast
        flood = [{"task_id": "t", "run_id": str(number), "reward": 1} for number in range(EVENTS)]
        with monkeypatch.context() as patch:
            patch.setattr(routes, "_PATIENCE_S", 0.5)
            told = explorer.http.post("/feedback", json={"feedback": flood}, headers=loud).json()
        assert told["counts"]["pending"] == EVENTS  # it is on disk, and behind
        reply = explorer.http.post(CHAT, json=HELLO, headers=quiet).json()["id"]
        rated = explorer.http.post("/feedback", json={"msg_ids": [reply], "reward": 1}, headers=quiet).json()
        assert rated["counts"]["accepted"] == 1
        assert explorer.http.post("/commit", json={}, headers=quiet).json()["committed"] == 1
        assert explorer.services.spool.backlog_bytes() > 0, "the flood is behind still"
        stopped = time.monotonic()
    assert time.monotonic() - stopped < 20  # STOP_S, and what is under way
    with explorer_running(settings) as explorer:
        explorer.until_flushed()
        eventually(lambda: explorer.rows("SELECT count(*) FROM feedback")[0][0] == EVENTS + 1)


def test_feedback_is_answered_while_another_key_of_the_tenant_floods(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    with explorer_running(settings_for(tmp_path, [double.url])) as explorer:
        loud, quiet, rater = (key(explorer, name, "one") for name in ("loud", "quiet", "rater"))
        explorer.ledger.recording.refuses = lambda record: bool(time.sleep(0.002))  # a database that is not fast
        flood = [{"task_id": "t", "run_id": str(number), "reward": 1} for number in range(EVENTS)]
        with monkeypatch.context() as patch:
            patch.setattr(routes, "_PATIENCE_S", 0.5)
            told = explorer.http.post("/feedback", json={"feedback": flood}, headers=loud).json()
        assert told["counts"]["pending"] == EVENTS
        for headers in (quiet, rater):
            reply = explorer.http.post(CHAT, json=HELLO, headers=quiet).json()["id"]
            rated = explorer.http.post("/feedback", json={"msg_ids": [reply], "reward": 1}, headers=headers).json()
            assert rated["counts"]["accepted"] == 1
        assert explorer.services.spool.backlog_bytes() > 0, "the flood is behind still"
