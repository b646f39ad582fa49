"""An explorer whose SQLite file is deleted or replaced while it serves, or put back alone from a backup."""

import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.doubles.engine import CHAT, EngineDouble
from tests.doubles.warm.commands import run_tuneloop
from tests.explorer.running import HELLO, eventually
from tests.explorer.test_main import attached_to, job, service, stored, write_settings
from tests.loop.harness.services import command_of, descendants
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.loader import load_settings

Change = Callable[[Path], object]


def _moved(path: Path) -> None:
    path.rename(path.with_suffix(".aside"))


def _replaced(path: Path) -> None:
    """As by a backup that is put back over the file in use."""
    copy = path.with_suffix(".copy")
    shutil.copy(path, copy)
    _moved(path)
    copy.rename(path)


def _put_back(path: Path) -> None:
    path.with_suffix(".aside").rename(path)


def _alarm(http: httpx.Client, name: str) -> bool:
    return any(
        sample.value == 1.0 and sample.labels.get("name") == name
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == "tuneloop_alarm"
    )


@pytest.mark.parametrize("change", [_moved, _replaced])
def test_without_its_file_nothing_is_taken_on_until_it_is_back(
    tmp_path: Path, double: EngineDouble, change: Change
) -> None:
    settings = write_settings(tmp_path, explorer__service_status_check_interval=0.1, **attached_to(double))
    database = job(tmp_path) / "buffer" / "exp_buffer.db"
    with service(settings) as (running, http):
        reply = http.post(CHAT, json=HELLO).json()["id"]
        eventually(lambda: stored(tmp_path)[State.RECORDED] == 1)
        change(database)
        time.sleep(1.0)
        for path, body in ((CHAT, HELLO), ("/feedback", {"msg_ids": [reply], "reward": 1})):
            refusal = http.post(path, json=body)
            assert refusal.status_code == 503, refusal.text
            assert refusal.json()["error"]["code"] == "storage_full"
            assert "exp_buffer.db was deleted or replaced" in refusal.json()["error"]["message"]
            assert refusal.headers["retry-after"] == "5"
        assert http.post("/commit", json={}).status_code == 503
        ready = http.get("/health/ready")
        assert (ready.status_code, "deleted or replaced" in ready.json()["reason"]) == (503, True)
        eventually(lambda: _alarm(http, "database_refuses"))
        heard = len(double.chats)
        [worker] = [pid for pid in descendants(running.pid) if "tuneloop.explorer.processes.worker" in command_of(pid)]
        os.kill(worker, signal.SIGKILL)  # the one that comes in its place knows the file no better
        eventually(lambda: _status(http) == 503)
        assert len(double.chats) == heard
        _put_back(database)
        eventually(lambda: http.get("/health/ready").status_code == 200)
        eventually(lambda: not _alarm(http, "database_refuses"))
        assert http.post("/feedback", json={"msg_ids": [reply], "reward": 1}).status_code == 200
        http.post(CHAT, json=HELLO)
        eventually(lambda: stored(tmp_path)[State.REWARDED] == 1)
        eventually(lambda: stored(tmp_path)[State.RECORDED] == 1)


def _status(http: httpx.Client) -> int:
    try:
        return http.post(CHAT, json=HELLO).status_code
    except httpx.TransportError:
        return 0


def chat(http: httpx.Client, count: int) -> list[str]:
    said = [str(http.post(CHAT, json=HELLO).json()["id"]) for _ in range(count)]
    assert http.post("/feedback", json={"msg_ids": said, "reward": 1}).status_code == 200
    eventually(lambda: http.post("/commit").status_code == 200)
    return said


def test_a_database_that_was_put_back_alone_gets_back_what_the_outbox_has(tmp_path: Path, double: EngineDouble) -> None:
    settings = write_settings(tmp_path, explorer__service_status_check_interval=0.1, **attached_to(double))

    def serve(replies: int, rows: int) -> list[str]:
        with service(settings) as (_, http):
            said = chat(http, replies)
            eventually(lambda: sum(stored(tmp_path).values()) == rows)
        return said

    serve(5, 5)
    database, copy = job(tmp_path) / "buffer" / "exp_buffer.db", tmp_path / "copy.db"
    with closing(sqlite3.connect(database)) as present, closing(sqlite3.connect(copy)) as other:
        present.backup(other)
    lost = serve(5, 10)
    for path in database.parent.glob("exp_buffer.db-*"):
        path.unlink()
    shutil.copyfile(copy, database)
    code, said, _ = run_tuneloop("doctor", "-c", settings)
    assert code == 0
    assert ": 10 records, " in said
    assert " bytes not in the database yet, the oldest for " in said
    serve(3, 13)
    with closing(Ledger.of(load_settings(settings))) as ledger, closing(sqlite3.connect(database)) as now:
        assert set(lost) <= {msg_id for (msg_id,) in now.execute("SELECT msg_id FROM exchanges")}
        assert ledger.reports.audit() == []
