"""Several explorers of one ledger are one service."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from tests.conftest import Place
from tests.databases import engine_of
from tests.doubles.clock import Clock
from tests.doubles.engine import EngineDouble
from tests.explorer.access.test_feedback_tokens import bearer
from tests.explorer.checkpoints import register
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually, settings_for
from tests.explorer.test_main import ended, write_settings
from tests.explorer.versions.test_reload import candidate, until
from tests.explorer.versions.test_unreadable import UNREADABLE, Machines, alarms, decided, elsewhere
from tuneloop.explorer.engines.fleet import EngineState
from tuneloop.explorer.metrics import Metrics, ProcessTotals
from tuneloop.explorer.versions.trial import CanaryController
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.errors import EnvironmentRefused, VersionRefused
from tuneloop.shared.experience import VersionAction, VersionState
from tuneloop.shared.held_files import EXPERIMENT
from tuneloop.shared.job_marks import KEY, Registered, load_key, write_mark
from tuneloop.shared.ledger.explorers import LEAD_S, Lead
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.attestation import Mismatch
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.operations import job_folder
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings


@pytest.fixture
def machines(running_explorer: Run, doubles: list[EngineDouble], tmp_path: Path) -> Iterator[Machines]:
    """Both serve version 1, and know of each other."""
    one = running_explorer(doubles[0])
    with elsewhere(one, doubles[1].url, tmp_path / "elsewhere", proxy_port=8011) as machines:
        candidate(one)
        until(one, 1, VersionState.CHAMPION)
        eventually(lambda: (machines.one.version(), machines.other.version()) == (1, 1))
        eventually(lambda: [each.version for each in one.ledger.explorers.all()] == [1, 1])
        yield machines


def test_who_alone_reads_the_champion_as_damaged_waits_and_moves_nobody(
    machines: Machines, doubles: list[EngineDouble]
) -> None:
    one, other, shared = machines.one, machines.other, machines.one.settings.job_dir
    machines.mounted.unlink()
    shutil.copytree(shared, machines.mounted)
    (machines.mounted / "global_step_1" / "actor" / "model.safetensors").write_bytes(b"half of it")
    doubles[1].resets = True
    eventually(lambda: other.services.fleet.engines[0].state is EngineState.DOWN)
    doubles[1].resets = False
    eventually(lambda: alarms(one) == [UNREADABLE])
    assert one.settings.explorer_name in one.ledger.alarms.all()[0].reason
    for _ in range(4):
        one.until_looked()
    assert (one.version(), one.ledger.versions.champion().version, decided(one)) == (1, 1, [])
    shutil.rmtree(machines.mounted)
    machines.mounted.symlink_to(shared)
    eventually(lambda: other.services.fleet.engines[0].state is EngineState.READY)
    assert other.version() == 1


@contextmanager
def late(explorer: RunningExplorer) -> Iterator[None]:
    """What the explorer records meanwhile comes into the ledger half a second after it is asked for."""
    explorer.ledger.recording.away = True
    timer = threading.Timer(0.5, lambda: setattr(explorer.ledger.recording, "away", False))
    try:
        yield timer.start()
    finally:
        timer.join()


def test_a_conversation_goes_on_at_once_on_another_explorer(machines: Machines) -> None:
    one, other = machines.one, machines.other
    request = {"model": HELLO["model"], "input": "3+4=", "max_output_tokens": 12}
    one.ledger.recording.away = True
    first = one.http.post("/v1/responses", json=request).json()["id"]
    with late(one):
        answer = other.http.post("/v1/responses", json=request | {"previous_response_id": first})
    assert answer.status_code == 200, answer.text
    one.ledger.recording.away = True
    stored = one.http.post("/v1/responses", json=request).json()["id"]
    with late(one):
        assert other.http.get(f"/v1/responses/{stored}").status_code == 200
    one.ledger.recording.away = True
    completion = one.chat().json()["id"]
    with late(one):
        assert other.http.get(f"/v1/chat/completions/{completion}").status_code == 200
    assert other.http.get(f"/v1/responses/{first[:-3]}000").status_code == 404


def test_a_token_of_a_browser_brings_so_many_events_to_all_explorers_together(machines: Machines) -> None:
    one, other = machines.one, machines.other
    msg_id = one.chat().json()["id"]
    token = bearer(one, {}, msg_id, max_events=3)

    def said(explorer: RunningExplorer, value: float) -> httpx.Response:
        return explorer.http.post("/feedback", json={"msg_ids": [msg_id], "reward": value}, headers=token)

    answers = [said((one, other)[number % 2], number).status_code for number in range(5)]
    assert answers == [200, 200, 200, 403, 403]


# A rollout.


def controller(settings: Settings, ledger: Ledger, metrics: Metrics) -> CanaryController:
    return CanaryController(settings, ledger, totals=ProcessTotals(metrics.registry), metrics=metrics)


def test_one_explorer_decides_about_a_rollout_by_what_all_have_counted(tables: Place, tmp_path: Path) -> None:
    clock = Clock()
    ledger = Ledger(engine_of(tables.url, tables.schema), clock=clock)
    terms = {"mode": "canary", "share": 0.5, "latency": None}
    busy = settings_for(tmp_path, ["http://one", "http://two"], rollout=terms | {"window": 1e12}, proxy_port=8011)
    idle = settings_for(tmp_path, ["http://one", "http://two"], rollout=terms | {"window": 1e-9}, proxy_port=8012)
    ledger.versions.ensure_base(busy.model.model_path.absolute())
    register(ledger, busy.job_dir)
    ledger.versions.begin_canary(1, by="explorer", reason="", details={"mode": "canary", "share": 0.5})

    metrics = Metrics()
    one, other = controller(busy, ledger, metrics), controller(idle, ledger, Metrics())
    asyncio.run(one.turn())
    for number in range(30):
        metrics.count_reply(1, "whole" if number else "failed")
    asyncio.run(one.turn())
    asyncio.run(other.turn())
    assert version_of(ledger) is VersionState.CANARY
    clock.now += LEAD_S
    asyncio.run(other.turn())
    assert version_of(ledger) is VersionState.ROLLED_BACK
    [event] = ledger.versions.events(1)[-1:]
    assert (event.action, event.details["tried"]["failures"]) == (VersionAction.ROLLED_BACK, {"found": 1, "of": 30})
    ledger.close()


def version_of(ledger: Ledger) -> VersionState:
    found = ledger.versions.get(1)
    assert found is not None
    return found.state


def test_a_lead_is_one_explorers_until_it_is_silent_and_then_over_for_good(engine: Engine, tmp_path: Path) -> None:
    clock = Clock()
    ledger = Ledger(engine, clock=clock)
    ledger.versions.ensure_base(tmp_path / "base")
    register(ledger, tmp_path / "job")
    ledger.versions.begin_canary(1, by="explorer", reason="")
    first = ledger.explorers.lead("one")
    assert (first, ledger.explorers.lead("other")) == (Lead("one", 1), None)
    clock.now += LEAD_S - 1
    assert ledger.explorers.lead("one") == first
    clock.now += LEAD_S
    second = ledger.explorers.lead("other")
    assert second == Lead("other", 2)
    for decide in (ledger.versions.roll_back, ledger.versions.promote):
        with pytest.raises(VersionRefused, match="another explorer decides"):
            decide(1, by="explorer", reason="", lead=first)
    ledger.versions.promote(1, lead=second)


def test_what_explorers_count_is_added_up_and_forgotten_in_time(engine: Engine) -> None:
    clock = Clock()
    explorers = Ledger(engine, clock=clock).explorers
    explorers.add("trial", {"asked": 2, "seconds": 0.5}, until=2000.0)
    explorers.add("trial", {"asked": 1}, until=2000.0)
    taken = [explorers.take("token", count, most=3, until=1500.0) for count in (2, 2, 1, 1)]
    assert taken == [True, False, True, False]
    assert explorers.counts("trial") == {"asked": 3, "seconds": 0.5}
    clock.now = 1500.0
    assert explorers.take("token", 3, most=3, until=2500.0)
    assert explorers.counts("trial") == {"asked": 3, "seconds": 0.5}


# Engines with wrong weights.


def test_only_the_rows_of_the_explorers_own_engine_are_dropped(machines: Machines) -> None:
    one, other = machines.one, machines.other
    names = {explorer.settings.explorer_name: explorer.chat().json()["id"] for explorer in (one, other)}
    for explorer in (one, other):
        explorer.until_flushed()
    found = Mismatch(0, 1, 0.0, 1e12, "other weights", {}, other.settings.explorer_name)
    assert one.ledger.attestations.distrust(found).dropped == 1 + dropped_before(other)
    after = one.chat().json()["id"]
    one.until_flushed()
    rows = {row.msg_id: row.state for row in one.rows("SELECT msg_id, state FROM experiences")}
    assert rows[names[one.settings.explorer_name]] == rows[after] == "recorded"
    assert rows[names[other.settings.explorer_name]] == "dropped"


def dropped_before(explorer: RunningExplorer) -> int:
    """The other replies of its engine, of the test's own looks."""
    query = f"SELECT count(*) AS rows FROM exchanges WHERE explorer = '{explorer.settings.explorer_name}'"
    return int(explorer.rows(query)[0].rows) - 1


# The job folder.


@pytest.fixture
def claimed(tmp_path: Path) -> Iterator[tuple[Path, Settings]]:
    """Settings of an experiment whose database, elsewhere, knows its folder."""
    path = write_settings(
        tmp_path,
        buffer={"trainer_input": {"experience_buffer": {"path": f"sqlite:///{tmp_path}/elsewhere.db"}}},
        explorer__rollout_model__engine_urls=["http://127.0.0.1:9"],
    )
    settings = load_settings(path)
    database.upgrade(settings.database_url, schema="exp_buffer")
    ledger = Ledger.of(settings)
    ledger.own(settings.project, settings.name)
    job_folder.claim_folder(settings.job_dir, ledger)
    load_key(settings.job_dir / KEY)
    yield path, settings
    ledger.close()


def test_no_service_makes_a_folder_anew_that_the_database_knows(claimed: tuple[Path, Settings]) -> None:
    path, settings = claimed
    settings.checkpoint_root_dir.rename(settings.checkpoint_root_dir.with_name("mounted"))
    code, sentence = ended(path)
    assert code == EnvironmentRefused.exit_code
    assert sentence.startswith(f"checkpoint_root_dir: {settings.job_dir} is not the folder that the database knows")
    assert not settings.checkpoint_root_dir.exists()
    with pytest.raises(EnvironmentRefused, match="mount the folder"):
        job_folder.claim_folder(settings.job_dir, Ledger.of(settings))
    settings.checkpoint_root_dir.with_name("mounted").rename(settings.checkpoint_root_dir)
    job_folder.claim_folder(settings.job_dir, Ledger.of(settings))


@pytest.mark.parametrize("at", ["root", "job"])
def test_a_running_service_writes_nothing_where_the_folder_is_away(claimed: tuple[Path, Settings], at: str) -> None:
    """The file system was mounted at the root of all checkpoints, or at the job folder itself."""
    _, settings = claimed
    place = settings.checkpoint_root_dir if at == "root" else settings.job_dir
    place.rename(place.with_name("mounted"))
    place.mkdir()
    writes: list[Any] = [
        lambda: CheckpointStore(settings.job_dir).stage(1),
        lambda: load_key(settings.job_dir / KEY),
        lambda: write_mark(settings.job_dir / "served.json", Registered(1, 1)),
    ]
    for write in writes:
        with pytest.raises(FileNotFoundError, match=EXPERIMENT):
            write()
    assert list(place.iterdir()) == []


def test_a_folder_of_another_experiment_is_refused(claimed: tuple[Path, Settings]) -> None:
    _, settings = claimed
    (settings.job_dir / EXPERIMENT).write_text("another\n")
    with pytest.raises(EnvironmentRefused, match="or is another's"):
        job_folder.claim_folder(settings.job_dir, Ledger.of(settings))
