"""Backups: outbox, database and checkpoints in a plain folder, put back into an empty job, on either database."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select

from tests.conftest import Place
from tests.databases import Schemas
from tests.explorer.checkpoints import register, write_model
from tests.factories import committed, exchange, experience, feedback, leased, outboxed
from tuneloop.runner.outbox import Outbox
from tuneloop.shared.checkpoints import check_files, read_manifest
from tuneloop.shared.errors import EnvironmentRefused, FileRefused
from tuneloop.shared.experience import Kind, State, encode
from tuneloop.shared.job_marks import KEY, require_restored, restoring_in
from tuneloop.shared.ledger.files import FILES
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database, dump, revisions
from tuneloop.shared.ledger.storage.schema import RESTORE, epochs
from tuneloop.shared.operations.backup import back_up, check_backup, restore
from tuneloop.shared.outbox_status import files_of, outbox_status, path_of
from tuneloop.shared.settings.settings import Settings

NUL = "a \0 and half a pair \ud800"
TABLES = ("exchanges", "experiences", "feedback", "versions", "version_events", "keys", "erasures", "epochs")


def later() -> float:
    return time.time() + 61


def settings_at(place: Place, folder: Path, model: Path) -> Settings:
    buffer: dict[str, object] = {"path": place.url}
    if place.schema is not None:
        buffer["name"] = place.schema
    return Settings.model_validate(
        {
            "checkpoint_root_dir": folder / "checkpoints",
            "model": {"model_path": model},
            "buffer": {"trainer_input": {"experience_buffer": buffer}},
        }
    )


def open_ledger(settings: Settings) -> Ledger:
    database.upgrade(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
    ledger = Ledger.of(settings)
    ledger.own(settings.project, settings.name)
    ledger.versions.ensure_base(settings.model.model_path.absolute())
    return ledger


class Experiment:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ledger = open_ledger(settings)

    @property
    def job(self) -> Path:
        return self.settings.job_dir

    def tables(self) -> dict[str, list[str]]:
        schema = self.settings.buffer.trainer_input.experience_buffer.name
        with dump.open_snapshot(self.settings.database_url, schema=schema) as snapshot:
            return {
                table: sorted(repr({k: v for k, v in row.items() if k != "path"}) for row in snapshot.rows(table))
                for table in TABLES
            }


class Bench:
    def __init__(self, folder: Path, kind: str, request: pytest.FixtureRequest) -> None:
        self._folder = folder
        self._opened: list[Experiment] = []
        self._place: Place | None = None
        if kind == "postgres":
            self._admin: Schemas = request.getfixturevalue("schemas")
            schema = f"Backup_{os.getpid()}_{folder.name[-20:]}"
            self._place = Place(request.getfixturevalue("postgres_url"), schema)
        self.model = write_model(folder / "model")

    def settings(self, name: str) -> Settings:
        """Those of an experiment that is not there yet; no other is there any more on PostgreSQL."""
        if self._place is not None:
            self.close()
        place = self._place or Place(f"sqlite:///{self._folder}/{name}.db", None)
        return settings_at(place, self._folder / name, self.model)

    def open(self, settings: Settings) -> Experiment:
        self._opened.append(found := Experiment(settings))
        return found

    def drop(self, settings: Settings) -> None:
        if self._place is not None:
            self._admin.drop(str(self._place.schema))
        for path in self._folder.glob("*.db*") if self._place is None else ():
            path.unlink()

    def close(self) -> None:
        for each in self._opened:
            each.ledger.close()
        if self._place is not None:
            self._admin.drop(str(self._place.schema))


BOTH = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    found = Bench(tmp_path, getattr(request, "param", "sqlite"), request)
    yield found
    found.close()


@pytest.fixture
def source(bench: Bench) -> Experiment:
    found = bench.open(bench.settings("source"))
    ledger, job = found.ledger, found.job
    for _ in range(2):
        ledger.versions.promote(register(ledger, job))
    committed(ledger, 3)
    leased(ledger, 2)
    said = exchange(user=NUL, task_id="t", run_id="r", experiences=(experience(), experience(choice=1)))
    ledger.recording.record([said, feedback(msg_id=said.msg_id, kind=Kind.COMMENT, value=None, text=NUL)])
    ledger.versions.pin(2, instead_of=2, by="ann", reason="demo")
    ledger.retention.erase("acme", "somebody")
    (job / KEY).parent.mkdir()
    (job / KEY).write_bytes(os.urandom(32))
    outboxed(found.settings.outbox_dir, exchange(msg_id="chatcmpl-waiting"), feedback(msg_id="chatcmpl-waiting"))
    return found


@pytest.mark.parametrize("bench", BOTH, indirect=True)
def test_what_was_backed_up_is_there_again_elsewhere(source: Experiment, bench: Bench, tmp_path: Path) -> None:
    (source.job / FILES).mkdir()
    (source.job / FILES / "file-1").write_bytes(b"{}\n")
    before = source.tables()
    counts, waiting = source.ledger.reports.counts(), outbox_status(source.settings.outbox_dir, {})
    back_up(source.settings, tmp_path / "backup")
    assert source.tables() == before
    assert not list(source.job.glob(".*"))
    there = bench.settings("target")
    restored = restore(there, tmp_path / "backup")
    target = bench.open(there)
    after = target.tables()
    changed = {table for table in before if before[table] != after[table]}
    counted_on = {"epochs", "versions", "version_events"}
    assert changed <= counted_on | {"experiences"}, "leases are given back, numbers left out"
    leased_rows = counts.pop(State.LEASED)
    assert target.ledger.reports.counts() == counts | {
        State.LEASED: 0,
        State.COMMITTED: counts[State.COMMITTED] + leased_rows,
    }
    assert target.ledger.reports.audit() == []
    assert (target.job / KEY).read_bytes() == (source.job / KEY).read_bytes()
    assert (target.job / FILES / "file-1").read_bytes() == b"{}\n"
    champion = target.ledger.versions.champion()
    assert (champion.version, champion.path, champion.pinned) == (2, target.job / "global_step_2", True)
    check_files(champion.path, read_manifest(champion.path, sha256=champion.manifest_sha256))
    assert outbox_status(there.outbox_dir, {}) == waiting
    assert waiting.records == 2
    assert restored.next_version > 1000
    target.ledger.versions.unpin(by="ann")
    assert register(target.ledger, target.job) == restored.next_version
    assert target.ledger.versions.newest().version == restored.next_version


def test_a_file_of_the_outbox_that_is_still_there_is_longer_than_its_copy(
    source: Experiment, bench: Bench, tmp_path: Path
) -> None:
    """The disk of the database was lost, that of the outbox was not."""
    settings = source.settings
    with closing(Outbox(settings.outbox_dir, 1 << 20)) as outbox:
        open_file = outbox.append([encode(exchange())]).file
        path = path_of(settings.outbox_dir, open_file)
        with path.open("ab") as torn:
            torn.write(path.read_bytes()[:9])
        back_up(settings, tmp_path / "backup")
        with path.open("ab") as torn:
            torn.truncate(torn.tell() - 9)
        outbox.append([encode(exchange())])
        with pytest.raises(EnvironmentRefused, match=f"an explorer runs: it holds {path}"):
            restore(settings, tmp_path / "backup", clock=later)
    there = bench.settings("target")
    shutil.copytree(settings.outbox_dir, there.outbox_dir)
    for file in files_of(there.outbox_dir):
        if file != open_file:
            path_of(there.outbox_dir, file).unlink()
    restore(there, tmp_path / "backup")
    assert outbox_status(there.outbox_dir, {}) == outbox_status(settings.outbox_dir, {})
    elsewhere = bench.settings("elsewhere")
    restore(elsewhere, tmp_path / "backup")
    assert outbox_status(elsewhere.outbox_dir, {}).records == 3


@pytest.mark.parametrize("bench", BOTH, indirect=True)
def test_what_is_there_is_never_replaced(source: Experiment, tmp_path: Path) -> None:
    back_up(source.settings, tmp_path / "backup")
    before = source.tables()
    with pytest.raises(EnvironmentRefused, match=r"trainer trainer was seen \d+ s ago: stop all services first"):
        restore(source.settings, tmp_path / "backup")
    with pytest.raises(EnvironmentRefused, match=r"already: .*global_step_1, .*global_step_2, tables in the database"):
        restore(source.settings, tmp_path / "backup", clock=later)
    assert source.tables() == before
    with pytest.raises(FileRefused, match="is there already"):
        back_up(source.settings, tmp_path / "backup")
    (tmp_path / "killed.partial").mkdir()
    with pytest.raises(FileRefused, match=r"killed\.partial is there: another backup writes it, or was killed"):
        back_up(source.settings, tmp_path / "killed")


def test_the_numbers_of_versions_that_may_have_been_published_are_left_out(
    source: Experiment, bench: Bench, tmp_path: Path
) -> None:
    now = time.time()
    back_up(source.settings, tmp_path / "backup", clock=lambda: now)

    def next_version(name: str, seconds: float, **but: int) -> int:
        there = bench.settings(name)
        found = restore(there, tmp_path / "backup", clock=lambda: now + seconds, **but).next_version
        target = bench.open(there)
        assert register(target.ledger, target.job) == found
        return found

    assert next_version("soon", 1) == 2001
    assert next_version("late", 86400) == 87001
    assert next_version("clock_behind", -5000) == 2001
    assert next_version("by_hand", 1, next_version=3) == 3
    with pytest.raises(EnvironmentRefused, match="version 2 was published already"):
        next_version("taken", 1, next_version=2)


def test_a_file_that_is_cut_or_gone_is_found_before_anything_is_touched(
    source: Experiment, bench: Bench, tmp_path: Path
) -> None:
    whole = tmp_path / "backup"
    manifest = back_up(source.settings, whole)
    assert not (tmp_path / "backup.partial").exists()
    there = bench.settings("target")
    for name in ["manifest.json", *manifest.files]:
        damaged = tmp_path / "damaged"
        shutil.copytree(whole, damaged)
        if data := (damaged / name).read_bytes():
            (damaged / name).write_bytes(data[:-1])
            with pytest.raises(FileRefused, match="damaged"):
                restore(there, damaged)
        (damaged / name).unlink()
        with pytest.raises(FileRefused, match=r"damaged|not a backup"):
            restore(there, damaged)
        shutil.rmtree(damaged)
    assert not there.job_dir.exists()
    restore(there, whole)


def test_a_backup_of_another_experiment_or_model_is_refused(source: Experiment, bench: Bench, tmp_path: Path) -> None:
    back_up(source.settings, tmp_path / "backup")
    there = bench.settings("target")
    with pytest.raises(
        EnvironmentRefused, match=r"is a backup of tuneloop/default, the settings are those of tuneloop/other"
    ):
        restore(there.model_copy(update={"name": "other"}), tmp_path / "backup")
    data = (tmp_path / "backup" / "manifest.json").read_text()
    (tmp_path / "backup" / "manifest.json").write_text(data.replace('"revision": "', '"revision": "later'))
    with pytest.raises(EnvironmentRefused, match=r"has the schema later.* of tuneloop .*: install that release"):
        restore(there, tmp_path / "backup")
    (tmp_path / "backup" / "manifest.json").write_text(data)
    other = Settings.model_validate(
        {"model": {"model_path": bench.model}}
        | {"buffer": {"trainer_input": {"experience_buffer": {"path": "postgresql://localhost/x"}}}}
    )
    with pytest.raises(EnvironmentRefused, match=r"another kind of database: it has no ledger\.pg_dump"):
        restore(other, tmp_path / "backup")
    (bench.model / "config.json").write_text("{}")
    with pytest.raises(EnvironmentRefused, match="is not the model that the versions of the backup come from"):
        restore(there, tmp_path / "backup")
    assert not there.job_dir.exists()


def test_a_champion_that_is_not_there_is_said(source: Experiment, tmp_path: Path) -> None:
    weights = source.job / "global_step_2" / "actor" / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(EnvironmentRefused, match="version 2 is needed and its files are missing or damaged"):
        back_up(source.settings, tmp_path / "backup")
    shutil.rmtree(source.job / "global_step_2")
    with pytest.raises(EnvironmentRefused, match="version 2 is needed and its files are missing or damaged"):
        back_up(source.settings, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    assert not list(source.job.glob(".*"))
    shutil.rmtree(source.job / "global_step_1")
    source.ledger.versions.unpin(by="ann")
    source.ledger.versions.roll_back(2, by="ann", reason="gone")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that has no room for a whole backup."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("no mounts here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_no_half_backup(source: Experiment, small_disk: Path) -> None:
    before = source.tables()
    with pytest.raises(FileRefused, match=r"disk is full.*nothing of it is left there"):
        back_up(source.settings, small_disk / "backup")
    assert list(small_disk.iterdir()) == []
    assert source.tables() == before


#: What a process asks the system for when it changes files.
_CALLS = {
    "open",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.link",
    "os.rmdir",
    "os.chmod",
    "fcntl.flock",
    "sqlite3.connect",
}


def killed_at(number: int, run: Callable[[], object]) -> bool:
    """Run it in a process that is killed at its so-manieth call; whether it was."""
    child = os.fork()
    if child == 0:
        calls = iter(range(number))
        sys.addaudithook(
            lambda name, _: os.kill(os.getpid(), 9) if name in _CALLS and next(calls, None) is None else None
        )
        try:
            run()
        except (FileRefused, EnvironmentRefused):
            os._exit(1)
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in {0, 9}
    return status == 9


@pytest.mark.parametrize("points_apart", [15, pytest.param(3, marks=pytest.mark.soak)])
def test_a_backup_killed_at_any_point_harms_nothing_and_is_refused(
    source: Experiment, bench: Bench, tmp_path: Path, points_apart: int
) -> None:
    before, files = source.tables(), sorted(path for path in source.job.rglob("*"))
    there, points, incomplete = bench.settings("target"), 0, 0
    source.ledger.close()
    while killed_at(points_apart * points, partial(back_up, source.settings, tmp_path / f"backup-{points}")):
        if not (tmp_path / f"backup-{points}").exists():
            with pytest.raises(FileRefused, match="not a backup"):
                check_backup(there, tmp_path / f"backup-{points}")
            incomplete += 1
        else:
            check_backup(there, tmp_path / f"backup-{points}")
        points += 1
    assert incomplete > 90 // points_apart
    check_backup(there, tmp_path / f"backup-{points}")
    assert source.tables() == before
    assert sorted(path for path in source.job.rglob("*")) == files


@pytest.mark.parametrize("points_apart", [25, pytest.param(5, marks=pytest.mark.soak)])
def test_a_restore_killed_at_any_point_is_given_again(
    source: Experiment, bench: Bench, tmp_path: Path, points_apart: int
) -> None:
    back_up(source.settings, tmp_path / "backup")
    source.ledger.close()
    half = 0
    for number in itertools.count():
        there = bench.settings(f"target-{number}")
        if not killed_at(points_apart * number, partial(restore, there, tmp_path / "backup")):
            break
        if restoring_in(there.job_dir):
            with pytest.raises(EnvironmentRefused, match="is half restored"):
                require_restored(there.job_dir)
            half += 1
            restore(there, tmp_path / "backup")
        elif revisions.current(there.database_url, schema="") is None:
            assert not list(there.job_dir.rglob("global_step_*")) + list(there.job_dir.rglob("*.records"))
            continue
        require_restored(there.job_dir)
        with closing(Ledger.of(there)) as ledger:
            assert ledger.transactions.read(select(epochs).where(epochs.c.trainer == RESTORE))
            assert ledger.reports.audit() == []
            assert sum(ledger.reports.counts().values()) == 9
        check_files(there.job_dir / "global_step_2", read_manifest(there.job_dir / "global_step_2"))
    assert half >= 100 // points_apart
