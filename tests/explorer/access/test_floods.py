"""What one key floods the service with keeps nobody else's from the database, nor the service from answering."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tests.explorer.wire import Wire, http_request
from tuneloop.explorer.access import rate_limits
from tuneloop.explorer.access.rate_limits import KeyMeter
from tuneloop.explorer.capture import flusher
from tuneloop.explorer.feedback import commit, routes
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import Outcome, Scope
from tuneloop.shared.ledger.keys import KeyGrant, KeyLimits

EVENTS = 3_000
#: A database that is not fast: by each event.
SLOW_S = 0.005


#: More requests at once than an event loop has threads.
MANY = 40

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


def test_what_many_requests_of_a_key_read_keeps_no_other_key_waiting(tmp_path: Path, double: EngineDouble) -> None:
    with explorer_running(settings_for(tmp_path, [double.url])) as explorer, ThreadPoolExecutor(MANY) as clients:
        loud, quiet = key(explorer, "loud"), key(explorer, "quiet")
        recording, began, is_loud, opened = explorer.ledger.recording, threading.Event(), True, threading.Event()
        look = recording.outcomes

        def outcomes(*asked: Any) -> dict[str, Outcome]:
            if is_loud:
                began.set()
                assert opened.wait(60)
            return look(*asked)

        recording.outcomes = outcomes  # type: ignore[method-assign]
        body = {"feedback": [{"task_id": "t", "run_id": "r", "reward": 1}]}
        flood = [clients.submit(explorer.http.post, "/feedback", json=body, headers=loud) for _ in range(MANY)]
        eventually(lambda: len(explorer.feedbacks()) == MANY and began.is_set())
        is_loud = False
        reply = explorer.http.post(CHAT, json=HELLO, headers=quiet).json()["id"]
        rated = explorer.http.post("/feedback", json={"msg_ids": [reply], "reward": 1}, headers=quiet).json()
        assert rated["counts"]["accepted"] == 1
        assert explorer.http.post("/commit", json={}, headers=quiet).json()["committed"] == 1
        opened.set()
        assert {each.result().status_code for each in flood} == {200}


def held_of(admit: Callable[[], None]) -> float:
    with pytest.raises(RequestRefused) as refused:
        admit()
    return refused.value.held_s


def test_refusals_are_answered_at_once_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "_PROMPT_REFUSALS", 3)
    now = 0.0
    meter = KeyMeter(KeyLimits(max_concurrent=1), lambda: now)
    meter.begin_request()
    assert [held_of(meter.admit) for _ in range(4)] == [0, 0, 0, rate_limits.HELD_S]
    now = 20.0  # a third of a minute
    assert [held_of(meter.admit) for _ in range(2)] == [0, rate_limits.HELD_S]


def test_refusals_that_are_held_back_are_not_answered_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "_PROMPT_REFUSALS", 1)
    monkeypatch.setattr(rate_limits, "_BETWEEN_S", 0.25)
    monkeypatch.setattr(rate_limits, "_LONGEST_HELD_S", 2.0)
    meter = KeyMeter(KeyLimits(max_concurrent=1), lambda: 0.0)
    meter.begin_request()
    assert [held_of(meter.admit) for _ in range(8)] == [0, 1.0, 1.25, 1.5, 1.75, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("known", [True, False])
def test_who_goes_on_after_refusals_waits_for_them_and_nobody_else_does(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(rate_limits, "_PROMPT_REFUSALS", 2)  # one more in half a minute
    monkeypatch.setattr(rate_limits, "HELD_S", 5.0)
    with explorer_running(settings_for(tmp_path, [double.url])) as explorer:
        bounded, quiet = key(explorer, "bounded", requests_per_minute=1), key(explorer, "quiet")
        sent = bounded["Authorization"] if known else "Bearer tl-unknown"
        ask = http_request(b"{}", f"Authorization: {sent}", path=CHAT)
        with Wire(explorer.url) as wire:
            for _ in range(2):
                wire.send(ask)
                assert wire.response().status == (429 if known else 401)
            began = time.monotonic()
            wire.send(ask * 3)
            assert explorer.http.post(CHAT, json=HELLO, headers=quiet).status_code == 200
            assert time.monotonic() - began < 5
            assert wire.response().status == (429 if known else 401)
            assert time.monotonic() - began >= 4.9
