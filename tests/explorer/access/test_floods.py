"""What one key floods the service with keeps nobody else's from the database, nor the service from answering."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.explorer.capture import flusher
from tuneloop.explorer.feedback import commit, routes
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant, KeyLimits

EVENTS = 3_000
#: A database that is not fast: by each event.
SLOW_S = 0.005


ALL = (Scope.INFERENCE, Scope.FEEDBACK, Scope.COMMIT)


def key(
    explorer: RunningExplorer, name: str, tenant: str = "", scopes: tuple[Scope, ...] = ALL, **limits: int
) -> dict[str, str]:
    grant = KeyGrant(name=name, tenant=tenant or name, scopes=scopes, limits=KeyLimits(**limits))
    headers = {"Authorization": f"Bearer {explorer.ledger.keys.create(grant, actor='test')[1]}"}
    eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
    eventually(lambda: explorer.http.get("/v1/models", headers=headers).status_code != 401)  # 403 without the scope
    return headers


def test_a_commit_is_answered_while_anothers_flood_is_moved_and_a_stop_does_not_wait_for_it(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path, [double.url])
    with explorer_running(settings) as explorer:
        loud, quiet = key(explorer, "loud"), key(explorer, "quiet")
        explorer.ledger.recording.refuses = lambda record: bool(time.sleep(SLOW_S))
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
        explorer.ledger.recording.refuses = lambda record: bool(time.sleep(SLOW_S))
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


def test_a_commit_waits_for_what_its_own_key_said_and_says_that_others_is_behind(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    with explorer_running(settings_for(tmp_path, [double.url])) as explorer:
        loud, quiet = key(explorer, "loud", "one"), key(explorer, "quiet", "one")
        releasing = key(explorer, "releasing", "one", (Scope.COMMIT,))
        assert "complete" not in explorer.http.post("/commit", json={}, headers=quiet).json()
        explorer.ledger.recording.refuses = lambda record: bool(time.sleep(SLOW_S))
        for module in (routes, commit):
            monkeypatch.setattr(module, "_PATIENCE_S", 0.5)
        flood = [{"task_id": "t", "run_id": str(number), "reward": 1} for number in range(EVENTS)]
        explorer.http.post("/feedback", json={"feedback": flood}, headers=loud)
        reply = explorer.http.post(CHAT, json=HELLO, headers=quiet).json()["id"]
        explorer.http.post("/feedback", json={"msg_ids": [reply], "reward": 1}, headers=quiet)
        told = explorer.http.post("/commit", json={}, headers=quiet).json()
        assert told == {"status": "success", "committed": 1, "complete": False}
        monkeypatch.setattr(commit, "_LONGEST_S", 0.5)
        assert explorer.http.post("/commit", json={}, headers=releasing).status_code == 503
        assert explorer.services.spool.backlog_bytes() > 0, "the flood is behind still"


def test_a_commit_waits_for_replies_that_may_have_a_reward_and_for_no_other(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    with explorer_running(settings_for(tmp_path, [double.url])) as explorer:
        loud, quiet = key(explorer, "loud", "one"), key(explorer, "quiet", "one")
        behind = explorer.services.spool.backlog_bytes

        def chat(headers: dict[str, str], **more: Any) -> str:
            return str(explorer.http.post(CHAT, json=HELLO | more, headers=headers).json()["id"])

        def rate(msg_id: str) -> Any:
            rated = {"msg_ids": [msg_id], "reward": 1}
            return explorer.http.post("/feedback", json=rated, headers=quiet).json()["counts"]

        def commit_all() -> Any:
            return explorer.http.post("/commit", json={}, headers=quiet).json()

        assert rate(chat(quiet))["accepted"] == 1
        monkeypatch.setattr(flusher, "_LOOK_S", 600.0)  # it moves what somebody waits for
        monkeypatch.setattr(flusher, "_ABSENT_S", 0.0)
        assert rate(chat(quiet))["accepted"] == 1
        chat(loud)
        assert commit_all() == {"status": "success", "committed": 2}
        assert behind() > 0
        chat(loud, metadata={"task_id": "t", "run_id": "r"})
        assert commit_all() == {"status": "success", "committed": 0}
        assert behind() == 0, "its run may have a reward"
        of_a_run = {"task_id": "t", "run_id": "none", "reward": 1}
        assert explorer.http.post("/feedback", json=of_a_run, headers=loud).json()["counts"]["pending"] == 1
        chat(loud)
        assert commit_all() == {"status": "success", "committed": 0}
        assert behind() > 0, "it is of no run"
        assert rate(explorer.services.feedback._signer.mint("one", 1))["pending"] == 1
        chat(loud)
        assert commit_all() == {"status": "success", "committed": 0}
        assert behind() == 0, "it may be the one that was rated before"


def test_feedback_that_finds_nothing_is_looked_up_once_where_nothing_else_is_behind(
    tmp_path: Path, double: EngineDouble
) -> None:
    with explorer_running(settings_for(tmp_path, [double.url])) as explorer:
        headers, recording = key(explorer, "rater"), explorer.ledger.recording
        looked, look = [], recording.outcomes
        recording.outcomes = lambda *asked: looked.append(asked) or look(*asked)  # type: ignore[method-assign,func-returns-value]
        told = explorer.http.post("/feedback", json={"task_id": "t", "run_id": "r", "reward": 1}, headers=headers)
        assert told.json()["counts"]["pending"] == 1
        assert len(looked) == 1
