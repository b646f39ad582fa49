"""An explorer whose SQLite file is deleted or replaced while it serves, or put back alone from a backup."""

import errno
import itertools
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select

import tests
from tests.conftest import Place, tables_at
from tests.doubles import postgres
from tests.doubles.engine import CHAT, EngineDouble
from tests.doubles.warm.commands import run_tuneloop
from tests.explorer.checkpoints import write_model
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.test_main import attached_to, job, service, stored, write_settings
from tests.loop.harness.services import command_of, descendants
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.schema import experiences
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


# Explorers whose clocks are wrong: nothing closes, expires or is deleted but by the time that has passed.


HOUR, DAY = 3600.0, 86400.0

#: All of these would be over for whoever believed a clock that is a day wrong.
_BOUNDS: dict[str, Any] = {
    "reward": {"attribution_window": HOUR, "default": -1.0},
    "retention": {"recorded": 6 * HOUR, "rewarded": 6 * HOUR, "trained": 6 * HOUR},
}


class Explorers:
    """Explorers of one experiment, each with an engine and an outbox of its own."""

    def __init__(self, root: Path, place: Place, doubles: dict[str, EngineDouble], patch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._place = place
        self._doubles = doubles
        self._patch = patch

    def settings(self, name: str) -> Path:
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        buffer = {"path": self._place.url, "name": self._place.schema}
        return write_settings(
            folder,
            checkpoint_root_dir=str(self._root / "checkpoints"),
            explorer__outbox_dir=str(folder / "outbox"),
            model__model_path=str(write_model(self._root / "model")),
            buffer__trainer_input__experience_buffer=buffer,
            explorer__service_status_check_interval=0.1,
            **_BOUNDS,
            **attached_to(self._doubles[name]),
        )

    @contextmanager
    def running(self, name: str, *, ahead_s: float) -> Iterator[httpx.Client]:
        """An explorer whose clock is wrong, on a machine of its own."""
        with self._patch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(tests.__path__[0]) / "doubles" / "set_clock"), prepend=":")
            patch.setenv("TUNELOOP_TEST_CLOCK", str(ahead_s))
            patch.setenv("TUNELOOP_TEST_BOOT", f"the machine of {name}")
            with service(self.settings(name)) as (_process, http):
                yield http

    def ledger(self) -> Ledger:
        """The ledger, as a trainer whose clock is right sees it."""
        return Ledger.of(load_settings(self.settings("one")))


@pytest.fixture
def explorers(
    tmp_path: Path,
    postgres_place: Place,
    doubles: list[EngineDouble],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Explorers]:
    with tables_at(postgres_place, request, "migrated"):
        yield Explorers(tmp_path, postgres_place, dict(zip(("one", "other"), doubles, strict=True)), monkeypatch)


def answered(http: httpx.Client) -> str:
    reply = http.post(CHAT, json=HELLO)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def rate(http: httpx.Client, msg_id: str) -> str:
    outcomes: dict[str, str] = http.post("/feedback", json={"msg_ids": [msg_id], "reward": 1}).json()["outcomes"]
    return outcomes[msg_id]


def commit(http: httpx.Client) -> int:
    answers: list[httpx.Response] = []

    def done() -> bool:
        answers.append(http.post("/commit", json={}))
        return answers[-1].status_code == 200

    eventually(done)
    return int(answers[-1].json()["committed"])


@pytest.mark.postgres
def test_explorers_a_day_ahead_and_a_day_behind_share_one_ledger(explorers: Explorers) -> None:
    ledger = explorers.ledger()
    with explorers.running("one", ahead_s=DAY) as ahead, explorers.running("other", ahead_s=-DAY) as behind:
        replies, unrated = [answered(ahead), answered(behind)], [answered(ahead), answered(behind)]
        eventually(lambda: ledger.reports.counts()[State.RECORDED] == 4)
        assert [rate(behind, replies[0]), rate(ahead, replies[1])] == ["accepted", "accepted"]
        assert commit(behind) + commit(ahead) == 2  # and what has no feedback yet has its window open
        assert ledger.reports.counts()[State.RECORDED] == len(unrated)
        eventually(lambda: clocks_are_told(ahead, ahead_s=DAY))
        eventually(lambda: [alarm.name for alarm in ledger.alarms.all()] == ["clock_skew"])
    epoch = ledger.training.take_epoch("a trainer whose clock is right")
    batch = ledger.training.lease(epoch, 2, BatchRules())
    assert sorted(each.msg_id for each in batch) == sorted(replies)
    assert all(abs(each.sampled_at - time.time()) < HOUR / 2 for each in batch)
    with explorers.running("one", ahead_s=-HOUR) as ahead:
        assert commit(ahead) == 0
        assert ledger.reports.counts()[State.LEASED] == 2
    version = ledger.training.register(
        epoch, [each.id for each in batch], step=1, publish=lambda _: (Path("x"), "5" * 64)
    )
    ledger.versions.reject(version, by="the test", reason="it has no files")
    for step in (DAY, -DAY):
        with explorers.running("one", ahead_s=step) as again:
            assert commit(again) == 0
            assert rate(again, answered(again)) == "accepted"
            assert commit(again) == 1
    counts = ledger.reports.counts()
    assert (counts[State.TRAINED], counts[State.RECORDED], counts[State.COMMITTED]) == (2, 2, 2)
    assert counts[State.EXPIRED] == 0
    assert ledger.reports.imbalance() == []
    ledger.close()


def clocks_are_told(http: httpx.Client, *, ahead_s: float) -> bool:
    for line in http.get("/metrics").text.splitlines():
        if line.startswith('tuneloop_clock_skew_seconds{clock="machine"}'):
            return abs(float(line.split()[-1]) - ahead_s) < HOUR / 2
    return False


# A disk that fails to bring records to disk now and then: who is refused is told, and nobody else loses anything.


def fail_every(patch: pytest.MonkeyPatch, nth: int) -> list[str]:
    """Let each so-manieth fsync of an outbox's file fail; the files that failed."""
    sync, counted, failed = os.fsync, itertools.count(1), list[str]()

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".records") and next(counted) % nth == 0:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    patch.setattr(os, "fsync", fsync)
    return failed


@pytest.mark.contract
def test_a_sync_that_fails_refuses_what_it_was_for_and_nothing_else(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = explorer.chat().json()["id"]
    failed = fail_every(monkeypatch, 1)
    refused = explorer.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_full")
    assert int(refused.headers["retry-after"]) > 0
    monkeypatch.undo()
    eventually(lambda: explorer.http.get("/health/ready").status_code == 200)
    second = explorer.chat().json()["id"]
    assert explorer.feedback(first, second).status_code == 200
    assert len(failed) == 1
    stored = [row.msg_id for row in explorer.rows("SELECT msg_id FROM experiences WHERE reward IS NOT NULL")]
    assert sorted(stored) == sorted([first, second])


@pytest.mark.contract
def test_through_many_syncs_that_fail_nothing_acknowledged_is_lost(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_every(monkeypatch, 12)

    def talk(_: int) -> tuple[list[str], list[str], int]:
        replies, rated, refusals = list[str](), list[str](), 0
        for _ in range(40):
            said = explorer.chat()
            refusals += said.status_code == 503
            if said.status_code == 200:
                replies.append(said.json()["id"])
                if explorer.feedback(replies[-1], reward=0.5).status_code == 200:
                    rated.append(replies[-1])
            else:
                eventually(lambda: explorer.http.get("/health/ready").status_code == 200)
        return replies, rated, refusals

    with ThreadPoolExecutor(6) as threads:
        said = list(threads.map(talk, range(6)))
    monkeypatch.undo()
    stored = explorer.rows("SELECT msg_id, reward FROM experiences")
    assert len(dict(stored)) == len(stored)
    assert {each for replies, _, _ in said for each in replies} <= dict(stored).keys()
    assert all(dict(stored)[each] == 0.5 for _, rated, _ in said for each in rated)
    assert len(set(failed)) >= 3
    assert sum(refusals for _, _, refusals in said) >= 3
    assert explorer.failures == []


# Two explorers, each with an outbox of its own, hear corrections of the same replies: the last word is the reward.


REPLIES, MINUTE = 100, 60.0

#: What is said of a reply, by turns: each explorer hears twice the same, but for what the other one heard between.
WORDS = (0.25, 0.75, 0.25, 1.0, 0.25)


@pytest.fixture
def server() -> Iterator[postgres.PostgresServer]:
    found = postgres.started()
    yield found
    found.close()


def say(services: list[httpx.Client], replies: list[str]) -> dict[str, float]:
    """Correct each reply by turns; the last word of each."""
    for turn, word in enumerate(WORDS):
        for number, each in enumerate(replies):
            asked = {"msg_ids": [each], "reward": (word + number / 1000) / 2}
            assert services[(turn + number) % 2].post("/feedback", json=asked).status_code == 200
    return {each: (WORDS[-1] + number / 1000) / 2 for number, each in enumerate(replies)}


@pytest.mark.postgres
@pytest.mark.contract
@pytest.mark.parametrize(("ahead_s", "away_s"), [(0.0, 10.0), (MINUTE, 0.0), (-MINUTE, 10.0)])
def test_the_last_word_counts_whoever_heard_it(
    tmp_path: Path,
    doubles: list[EngineDouble],
    monkeypatch: pytest.MonkeyPatch,
    server: postgres.PostgresServer,
    ahead_s: float,
    away_s: float,
) -> None:
    place = Place(server.url, "exp_buffer")
    explorers = Explorers(tmp_path, place, dict(zip(("one", "other"), doubles, strict=True)), monkeypatch)
    with explorers.running("one", ahead_s=0.0) as one, explorers.running("other", ahead_s=ahead_s) as other:
        replies = [str(one.post(CHAT, json=HELLO).json()["id"]) for _ in range(REPLIES)]
        eventually(lambda: one.post("/commit", json={"task_id": "nobody"}).status_code == 200)
        if away_s:
            server.stop()
        began = time.monotonic()
        last = say([one, other], replies)
        if away_s:
            time.sleep(max(0.0, began + away_s - time.monotonic()))
            server.start()
        for each in (one, other):
            eventually(lambda: each.post("/commit", json={"task_id": "nobody"}).status_code == 200)  # noqa: B023
        engine = connect(place.url, schema=str(place.schema))
        with engine.connect() as connection:
            found = connection.execute(select(experiences.c.msg_id, experiences.c.reward)).all()
        engine.dispose()
        assert {row.msg_id: row.reward for row in found} == last
        if ahead_s:
            with closing(explorers.ledger()) as ledger:
                eventually(lambda: [alarm.name for alarm in ledger.alarms.all()] == ["clock_skew"])
