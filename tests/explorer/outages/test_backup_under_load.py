"""A backup of a service under load, as operators take it: what was acknowledged before is in it once."""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Connection, insert, text

from tests.databases import Schemas
from tests.doubles.engine import CHAT, EngineDouble
from tests.doubles.warm.commands import run_tuneloop
from tests.explorer.checkpoints import register
from tests.explorer.running import HELLO, eventually
from tests.explorer.test_main import attached_to, job, service, write_settings
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.dump import open_snapshot
from tuneloop.shared.ledger.storage.schema import experience_counts, metadata
from tuneloop.shared.settings.loader import load_settings

#: The backup and both services share the cores with the crowd.
_THOUGHT_S = 0.1


class Crowd:
    """Clients that chat and rate until told to stop: what they were told is in `replies` and `rated`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.replies: list[str] = []
        self.rated: list[str] = []
        self._threads = [threading.Thread(target=self._chat) for _ in range(3)]

    def __enter__(self) -> "Crowd":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _chat(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._stop.wait(_THOUGHT_S):
                said = http.post(CHAT, json=HELLO).raise_for_status().json()["id"]
                self.replies.append(said)
                http.post("/feedback", json={"msg_ids": [said], "reward": 0.5}).raise_for_status()
                self.rated.append(said)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def buffer(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Where the ledger is: settings of the buffer."""
    if request.param == "sqlite":
        yield {}
        return
    schemas: Schemas = request.getfixturevalue("schemas")
    found = {"path": request.getfixturevalue("postgres_url"), "name": f"under_load_{os.getpid()}"}
    yield found
    schemas.drop(found["name"])


def settings_file(folder: Path, double: EngineDouble, buffer: dict[str, str]) -> Path:
    return write_settings(
        folder,
        explorer__workers=2,
        explorer__service_status_check_interval=0.1,
        buffer__trainer_input__experience_buffer=buffer,
        **attached_to(double),
    )


def tuneloop(*arguments: object) -> str:
    ended = run_tuneloop(*arguments)
    assert ended.code == 0, ended.errors
    return ended.output


def version(http: httpx.Client) -> int:
    return int(http.post(CHAT, json=HELLO).headers["x-tuneloop-version"])


def publish(settings: Path) -> int:
    """What a trainer does."""
    read = load_settings(settings)
    with closing(Ledger.of(read)) as ledger:
        return register(ledger, read.job_dir)


def rewards(settings: Path) -> list[tuple[str, float | None]]:
    """Every reply in the ledger, with its reward."""
    read = load_settings(settings)
    schema = read.buffer.trainer_input.experience_buffer.name
    with open_snapshot(read.database_url, schema=schema) as snapshot:
        return [(row["msg_id"], row["reward"]) for row in snapshot.rows("experiences") if row["tenant"] == "default"]


def test_a_service_goes_on_from_a_backup_that_was_taken_under_load(
    tmp_path: Path, double: EngineDouble, buffer: dict[str, str], request: pytest.FixtureRequest
) -> None:
    settings = settings_file(tmp_path, double, buffer)
    with service(settings) as (running, http):
        assert publish(settings) == 1
        eventually(lambda: version(http) == 1)
        with Crowd(str(http.base_url)) as crowd:
            eventually(lambda: len(crowd.rated) > 40)
            before = set(crowd.replies), set(crowd.rated)
            tuneloop("backup", tmp_path / "backup", "-c", settings)
            until = len(crowd.rated) + 40
            eventually(lambda: len(crowd.rated) > until)
        running.send_signal(signal.SIGKILL)
        running.wait()
    job(tmp_path).rename(tmp_path / "lost")
    if buffer:
        request.getfixturevalue("schemas").drop(buffer["name"])
    assert "the next version is 2001" in tuneloop("restore", tmp_path / "backup", "-c", settings)
    with service(settings) as (_, http):
        eventually(lambda: http.post("/commit").status_code == 200)
        assert version(http) == 1
        there = rewards(settings)
        assert len(dict(there)) == len(there)
        assert before[0] <= dict(there).keys()
        assert all(dict(there)[each] == 0.5 for each in before[1])
        lost = [each for each in crowd.replies if each not in dict(there)]
        assert len(lost) >= 40
        asked = {"msg_ids": [lost[-1], crowd.replies[0]], "reward": 1}
        told = http.post("/feedback", json=asked).json()["outcomes"]
        assert told == {lost[-1]: "unknown", crowd.replies[0]: "accepted"}
        late = http.post(CHAT, json=HELLO).json()["id"]
        assert http.post("/feedback", json={"msg_ids": [late], "reward": 1}).json()["outcomes"] == {late: "accepted"}
        assert http.post("/commit").json()["committed"] >= 1
        assert publish(settings) == 2001
        eventually(lambda: version(http) == 2001)
    with closing(Ledger.of(load_settings(settings))) as ledger:
        assert ledger.reports.audit() == []
        assert ledger.reports.counts()[State.TRAINED] == 2


@pytest.mark.contract
@pytest.mark.parametrize(("outbox", "database"), [(1, 2), (2, 1)])
def test_the_outbox_of_one_backup_goes_with_the_database_of_another(
    tmp_path: Path,
    double: EngineDouble,
    buffer: dict[str, str],
    request: pytest.FixtureRequest,
    outbox: int,
    database: int,
) -> None:
    settings = settings_file(tmp_path, double, buffer)
    with service(settings) as (running, http):
        with Crowd(str(http.base_url)) as crowd:
            eventually(lambda: len(crowd.rated) > 30)
            before = set(crowd.replies), set(crowd.rated)
            tuneloop("backup", tmp_path / "1", "-c", settings)
            until = len(crowd.rated) + 30
            eventually(lambda: len(crowd.rated) > until)
            tuneloop("backup", tmp_path / "2", "-c", settings)
        running.send_signal(signal.SIGKILL)
        running.wait()
    job(tmp_path).rename(tmp_path / "lost")
    if buffer:
        request.getfixturevalue("schemas").drop(buffer["name"])
    said = tuneloop("restore", tmp_path / str(database), "-c", settings)
    assert "what was acknowledged after" in said
    assert "may be missing" in said
    shutil.rmtree(job(tmp_path) / "outbox")
    shutil.copytree(tmp_path / str(outbox) / "outbox", job(tmp_path) / "outbox")
    with service(settings) as (_, http):
        eventually(lambda: http.post("/commit").status_code == 200)
    there = rewards(settings)
    assert len(dict(there)) == len(there)
    assert before[0] <= dict(there).keys()
    assert all(dict(there)[each] == 0.5 for each in before[1])


def copy_of(settings: Path) -> dict[str, list[dict[str, object]]]:
    """All rows, as of one moment."""
    read = load_settings(settings)
    schema = read.buffer.trainer_input.experience_buffer.name
    with open_snapshot(read.database_url, schema=schema) as snapshot:
        return {table.name: [dict(row) for row in snapshot.rows(table.name)] for table in metadata.sorted_tables}


def put_back(connection: Connection, rows: dict[str, list[dict[str, object]]]) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("LOCK TABLE outbox_files, exchanges IN ACCESS EXCLUSIVE MODE"))
    for table in reversed(metadata.sorted_tables):
        connection.execute(table.delete())
    for table in metadata.sorted_tables:
        if rows[table.name]:
            connection.execute(insert(table), rows[table.name])
    connection.execute(experience_counts.delete())  # into which triggers counted the rows again
    connection.execute(insert(experience_counts), rows["experience_counts"])


@pytest.mark.contract
def test_a_standby_that_lagged_is_refilled_while_clients_go_on(
    tmp_path: Path, double: EngineDouble, buffer: dict[str, str]
) -> None:
    """The database becomes what it was some seconds ago, twice: once while the explorer runs, and between two."""
    settings = settings_file(tmp_path, double, buffer)
    read = load_settings(settings)
    rated = set[str]()

    def lag(http: httpx.Client) -> dict[str, list[dict[str, object]]]:
        """What the database was before it took some more."""
        rows, until = copy_of(settings), len(crowd.rated) + 30
        eventually(lambda: len(crowd.rated) > until)
        eventually(lambda: http.post("/commit", json={"task_id": "nobody"}).status_code == 200)
        return rows

    with service(settings) as (_, http):
        engine = connect(read.database_url, schema=read.buffer.trainer_input.experience_buffer.name)
        writing = engine.execution_options(sqlite_begin="IMMEDIATE")
        with Crowd(str(http.base_url)) as crowd:
            eventually(lambda: len(crowd.rated) > 30)
            rows = lag(http)
            before = set(crowd.rated)
            with writing.begin() as connection:
                put_back(connection, rows)
            promoted = time.monotonic()
            eventually(lambda: before <= {name for name, reward in rewards(settings) if reward == 0.5}, 15.0)
            sys.stdout.write(f"refilled after {time.monotonic() - promoted:.1f} s\n")
            rows = lag(http)
        rated |= set(crowd.rated)
    with writing.begin() as connection:
        put_back(connection, rows)
    with service(settings):
        eventually(lambda: rated <= {name for name, reward in rewards(settings) if reward == 0.5}, 15.0)
    engine.dispose()
    there = rewards(settings)
    assert len(dict(there)) == len(there)
    with closing(Ledger.of(read)) as ledger:
        assert ledger.reports.audit() == []
