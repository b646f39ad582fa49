"""A service that gets up while its database is away."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.doubles import postgres
from tests.doubles.engine import CHAT, EngineDouble
from tests.doubles.serving import serving
from tests.explorer.checkpoints import register
from tests.explorer.running import HELLO, eventually, settings_for
from tests.explorer.whole import create_app
from tests.factories import exchange
from tuneloop.explorer.processes import lazy_ledger
from tuneloop.explorer.processes.key_watch import KeyWatch
from tuneloop.explorer.processes.lazy_ledger import LazyLedger, open_ledger
from tuneloop.shared.errors import DatabaseAway, EnvironmentRefused, LedgerUnavailable
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.settings.settings import Settings


@pytest.fixture
def server() -> Iterator[postgres.PostgresServer]:
    server = postgres.started()
    yield server
    server.close()


def settings_on(url: str, tmp_path: Path, *engines: EngineDouble) -> Settings:
    settings = settings_for(tmp_path, [each.url for each in engines])
    settings.job_dir.mkdir(parents=True, exist_ok=True)
    buffer = {"trainer_input": {"experience_buffer": {"path": url}}}
    return Settings.model_validate(settings.model_dump() | {"buffer": buffer})


def served_once(settings: Settings) -> Ledger:
    """As after a first life of the service, in which versions were published."""
    ledger = open_ledger(settings)
    KeyWatch(settings, ledger.keys).open()
    register(ledger, settings.job_dir)
    assert ledger.versions.candidate().version == 1
    ledger.versions.promote(1)
    register(ledger, settings.job_dir)
    assert ledger.versions.candidate().version == 2
    return ledger


def opened_while_away(folder: Path, server: postgres.PostgresServer, statement: str) -> LazyLedger:
    """A ledger that is opened while its database is away, which is then back, changed by a statement."""
    settings = settings_on(server.url, folder)
    open_ledger(settings).close()
    server.stop()
    ledger = open_ledger(settings)
    server.start()
    engine = database.connect(server.url)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()
    return ledger


def test_a_first_start_needs_its_database(tmp_path: Path) -> None:
    settings = settings_on("postgresql://someone:secret@127.0.0.1:9/none", tmp_path)
    with pytest.raises(EnvironmentRefused, match="start it, or correct the URL"):
        open_ledger(settings)
    assert not list(settings.job_dir.iterdir())


def test_verbs_that_come_at_once_wait_for_the_one_that_opens_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_ledger, "_PATIENCE_S", 60.0)
    ledger = LazyLedger.of(settings_on(f"sqlite:///{tmp_path}/a.db", tmp_path))
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(ledger.recording.commit, "acme") for _ in range(8)]
        assert [each.result() for each in found] == [0] * 8
    ledger.close()


def test_verbs_that_come_at_once_try_a_database_that_is_away_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, come = [], threading.Semaphore(0)

    def commit() -> int:
        come.release()
        return ledger.recording.commit("acme")

    def away(url: str, *, schema: str | None = None) -> None:
        tried.append(url)
        for _ in range(8):
            come.acquire()
        time.sleep(0.2)  # they are but a few steps before the door
        raise DatabaseAway("away")

    monkeypatch.setattr(lazy_ledger, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(lazy_ledger, "upgrade", away)
    ledger = LazyLedger.of(settings_on(f"sqlite:///{tmp_path}/a.db", tmp_path))
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(commit) for _ in range(8)]
        assert all(isinstance(each.exception(), LedgerUnavailable) for each in found)
    assert len(tried) == 1
    ledger.close()


@pytest.mark.postgres
def test_what_was_served_is_known_until_the_database_is_back(tmp_path: Path, server: postgres.PostgresServer) -> None:
    settings = settings_on(server.url, tmp_path)
    served_once(settings).close()
    server.stop()
    ledger = open_ledger(settings)
    assert (ledger.versions.champion().version, ledger.versions.champion().path.name) == (1, "global_step_1")
    assert [each.version for each in ledger.versions.all()] == [1, 2]
    for verb in (
        lambda: ledger.recording.record([exchange()]),
        ledger.versions.candidate,
        ledger.reports.counts,
        lambda: ledger.recording.commit("acme"),
    ):
        with pytest.raises(LedgerUnavailable):
            verb()
    server.start()
    ledger.recording.record([exchange()])
    assert ledger.reports.counts()[State.RECORDED] == 1
    assert ledger.versions.candidate().version == 2
    ledger.close()


@pytest.mark.postgres
def test_the_schema_is_brought_up_to_date_at_the_first_verb_that_reaches_the_database(
    tmp_path: Path, server: postgres.PostgresServer
) -> None:
    ledger = opened_while_away(tmp_path, server, "DROP SCHEMA exp_buffer CASCADE")
    ledger.recording.record([exchange()])
    assert ledger.versions.champion().version == 0
    ledger.close()


@pytest.mark.postgres
def test_a_database_of_another_experiment_is_refused_when_it_is_back(
    tmp_path: Path, server: postgres.PostgresServer
) -> None:
    ledger = opened_while_away(tmp_path, server, "UPDATE exp_buffer.experiment SET name = 'other'")
    with pytest.raises(EnvironmentRefused, match="belongs to tuneloop/other"):
        ledger.recording.record([exchange()])
    assert ledger.versions.champion().version == 0
    ledger.close()


@pytest.mark.parametrize("data", [b"", b"{}", b'{"base": 5}', b"\xff"])
def test_a_memory_of_nonsense_is_none(tmp_path: Path, data: bytes) -> None:
    settings = settings_on("postgresql://someone@127.0.0.1:9/none", tmp_path)
    (settings.job_dir / "served.json").write_bytes(data)
    assert not LazyLedger.of(settings).versions.remembers


def test_a_memory_of_another_model_is_none(tmp_path: Path) -> None:
    settings = settings_on(f"sqlite:///{tmp_path}/ledger.db", tmp_path)
    open_ledger(settings).close()
    assert LazyLedger.of(settings).versions.remembers
    other = settings.model.model_copy(update={"model_path": tmp_path / "other"})
    assert not LazyLedger.of(settings.model_copy(update={"model": other})).versions.remembers


def test_a_memory_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    settings = settings_on(f"sqlite:///{tmp_path}/ledger.db", tmp_path)
    (settings.job_dir / "served.json").mkdir()
    ledger = open_ledger(settings)
    assert ledger.versions.champion().version == 0
    ledger.close()


@pytest.mark.postgres
def test_an_engine_is_given_the_weights_that_were_served(
    tmp_path: Path, server: postgres.PostgresServer, double: EngineDouble
) -> None:
    settings = settings_on(server.url, tmp_path, double)
    served_once(settings).close()
    server.stop()
    double.weights = settings.job_dir / "global_step_2" / "actor"  # left in it, and never proved
    ledger = open_ledger(settings)
    with serving(create_app(settings, ledger, on_failure=pytest.fail)) as url:
        eventually(lambda: httpx.get(url + "/health/ready", timeout=60).status_code == 200)
        assert double.weights == settings.job_dir / "global_step_1" / "actor"
        assert httpx.post(url + CHAT, json=HELLO, timeout=60).headers["x-tuneloop-version"] == "1"
        server.start()
        eventually(lambda: ledger.versions.champion().version == 2)
        eventually(lambda: httpx.post(url + CHAT, json=HELLO, timeout=60).headers["x-tuneloop-version"] == "2")
    assert sum(ledger.reports.counts().values()) >= 2
    ledger.close()
