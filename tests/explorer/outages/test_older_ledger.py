"""Somebody puts back the database alone: the explorer says so, and keeps what its spool still has of it."""

import json
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx

from tests.doubles.engine import CHAT, EngineDouble
from tests.doubles.warm.commands import run_tuneloop
from tests.explorer.running import HELLO, eventually
from tests.explorer.test_main import attached_to, job, service, write_settings
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.loader import load_settings


def chat(http: httpx.Client, count: int) -> list[str]:
    said = [str(http.post(CHAT, json=HELLO).json()["id"]) for _ in range(count)]
    assert http.post("/feedback", json={"msg_ids": said, "reward": 1}).status_code == 200
    eventually(lambda: http.post("/commit").status_code == 200)
    return said


def serve_once(settings: Path, count: int = 0) -> list[str]:
    """A service's life, in which it answers so many requests; it is killed with all of them in the database."""
    with service(settings) as (running, http):
        said = chat(http, count) if count else []
        running.send_signal(signal.SIGKILL)
        running.wait()
    return said


def alarms(settings: Path) -> list[str]:
    with closing(Ledger.of(load_settings(settings))) as ledger:
        return [each.name for each in ledger.alarms.all()]


def test_a_database_that_was_put_back_alone_is_noticed_and_gets_back_what_the_spool_has(
    tmp_path: Path, double: EngineDouble
) -> None:
    settings = write_settings(tmp_path, explorer__service_status_check_interval=0.1, **attached_to(double))
    serve_once(settings, 5)
    database, copy = job(tmp_path) / "buffer" / "exp_buffer.db", tmp_path / "copy.db"
    with closing(sqlite3.connect(database)) as present, closing(sqlite3.connect(copy)) as other:
        present.backup(other)
    lost = serve_once(settings, 5)
    code, said, _ = run_tuneloop("doctor", "-c", settings)
    assert (code, "older" in said) == (0, False)
    for path in database.parent.glob("exp_buffer.db-*"):
        path.unlink()
    shutil.copyfile(copy, database)
    code, said, _ = run_tuneloop("doctor", "-c", settings)
    assert code == 1
    assert "the last replies that it took from 1 slot are not in it, unless they were purged" in said
    assert json.loads(run_tuneloop("doctor", "-c", settings, "--json")[1])["older"]
    serve_once(settings, 3)
    assert alarms(settings) == ["ledger_older"]
    assert [each.suffix for each in (job(tmp_path) / "spool" / "0").glob("*.kept")] == [".kept"]
    code, said, error = run_tuneloop("db", "adopt", "-c", settings)
    assert (code, error) == (0, "")
    assert "16 records of the spool were offered to the database again, 0 were refused" in said
    assert "the next version is 1001" in said
    code, said, _ = run_tuneloop("doctor", "-c", settings)
    assert (code, "older" in said) == (0, False)
    assert alarms(settings) == []
    assert not list((job(tmp_path) / "spool" / "0").glob("*.kept"))
    with closing(Ledger.of(load_settings(settings))) as ledger:
        assert ledger.restoration.absent(lost) == set()
        assert sum(ledger.reports.counts().values()) == 13
