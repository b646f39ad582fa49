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
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import Outcome, Scope
from tuneloop.shared.ledger.keys import KeyGrant, KeyLimits

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
