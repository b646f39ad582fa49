"""A folder that cannot be read is not damage: nothing is decided for anybody, and an alarm says it until it is back."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.databases import engine_of
from tests.doubles.engine import EngineDouble
from tests.explorer.checkpoints import publish, write_model
from tests.explorer.conftest import Run
from tests.explorer.running import (
    CountingVersions,
    MoodyLedger,
    RunningExplorer,
    eventually,
    explorer_running,
    settings_for,
)
from tests.explorer.versions.test_corruptions import version_at
from tests.explorer.versions.test_reload import candidate, until, until_ready, version
from tuneloop.explorer.engines.fleet import EngineState
from tuneloop.explorer.versions.loading import Verifier, verify_in_process
from tuneloop.explorer.versions.verifier import verify
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.errors import CheckpointUnreadable
from tuneloop.shared.experience import VersionAction, VersionState
from tuneloop.shared.ledger.ledger import Version

pytestmark = pytest.mark.contract

UNREADABLE = "version_unreadable"


def alarms(explorer: RunningExplorer) -> list[str]:
    return [each.name for each in explorer.ledger.alarms.all()]


def decided(explorer: RunningExplorer) -> list[tuple[int, VersionAction]]:
    """What was decided against versions."""
    against = {VersionAction.REJECTED, VersionAction.ROLLED_BACK}
    events = [each for number in range(5) for each in explorer.ledger.versions.events(number)]
    return [(each.version, each.action) for each in events if each.action in against]


# Two machines.


class VersionsElsewhere(CountingVersions):
    """The versions as a machine knows them where the shared folder is `here`, not `there`."""

    here, there = Path(), Path()

    def _seen(self, found: Version) -> Version:
        inside = found.path.is_relative_to(self.there)
        return found._replace(path=self.here / found.path.relative_to(self.there)) if inside else found

    def champion(self) -> Version:
        return self._seen(super().champion())

    def candidate(self) -> Version | None:
        found = super().candidate()
        return found and self._seen(found)

    def get(self, number: int) -> Version | None:
        found = super().get(number)
        return found and self._seen(found)


@dataclass
class Machines:
    """Two explorers of one ledger and one shared folder, each with an engine."""

    one: RunningExplorer
    other: RunningExplorer
    mounted: Path

    def lose(self) -> None:
        """Leave an empty folder on the other machine where the shared one was."""
        self.mounted.unlink()
        self.mounted.mkdir()

    def find(self) -> None:
        """Have it back there."""
        shutil.rmtree(self.mounted)
        self.mounted.symlink_to(self.one.settings.job_dir)


@contextmanager
def elsewhere(one: RunningExplorer, url: str, folder: Path, **but: Any) -> Iterator[Machines]:
    settings = settings_for(folder, [url], outbox_dir=folder / "outbox", **but).model_copy(
        update={"model": one.settings.model}
    )
    settings.job_dir.parent.mkdir(parents=True)
    settings.job_dir.symlink_to(one.settings.job_dir)
    ledger = MoodyLedger(engine_of(f"sqlite:///{one.settings.job_dir}/ledger.db"), rule=settings.reward)
    ledger.versions = VersionsElsewhere(ledger.transactions)
    ledger.versions.here, ledger.versions.there = settings.job_dir, one.settings.job_dir
    with explorer_running(settings, ledger) as other:
        yield Machines(one, other, settings.job_dir)


@pytest.fixture
def machines(running_explorer: Run, doubles: list[EngineDouble], tmp_path: Path) -> Iterator[Machines]:
    """Both serve version 2."""
    one = running_explorer(doubles[0])
    with elsewhere(one, doubles[1].url, tmp_path / "elsewhere") as machines:
        for number in (1, 2):
            candidate(one)
            until(one, number, VersionState.CHAMPION)
        eventually(lambda: (machines.one.version(), machines.other.version()) == (2, 2))
        yield machines


def test_an_explorer_that_loses_the_folder_serves_on_and_takes_up_what_came_meanwhile(machines: Machines) -> None:
    one, other = machines.one, machines.other
    machines.lose()
    for number in (3, 4):
        candidate(one)
        until(one, number, VersionState.CHAMPION)
    eventually(lambda: alarms(one) == [UNREADABLE])
    for _ in range(4):
        other.until_looked()
    assert (one.version(), other.version()) == (4, 2)
    assert other.http.get("/health/ready").status_code == 200
    assert str(machines.mounted / "global_step_") in one.ledger.alarms.all()[0].reason
    machines.find()
    eventually(lambda: other.version() == 4)
    eventually(lambda: alarms(one) == [])
    assert decided(one) == []


def test_an_engine_that_restarts_where_the_folder_is_away_moves_no_other_explorer(
    machines: Machines, doubles: list[EngineDouble]
) -> None:
    one, other = machines.one, machines.other
    machines.lose()
    doubles[1].resets = True
    eventually(lambda: other.services.fleet.engines[0].state is EngineState.DOWN)
    doubles[1].resets = False
    eventually(lambda: alarms(one) == [UNREADABLE])
    ready = other.http.get("/health/ready")
    assert (ready.status_code, ready.json()["reason"].split(":")[0]) == (503, "no engine is ready")
    assert other.chat().status_code == 503
    assert (one.version(), one.ledger.versions.champion().version) == (2, 2)
    candidate(one)
    until(one, 3, VersionState.CHAMPION)
    machines.find()
    until_ready(other, 1)
    eventually(lambda: other.version() == 3)
    eventually(lambda: alarms(one) == [])
    assert decided(one) == []


# One explorer.


@pytest.fixture
def away(explorer: RunningExplorer) -> Path:
    """Where the folder of version 3 lies, which is not where it should be; version 2 is served."""
    for number in (1, 2):
        candidate(explorer)
        until(explorer, number, VersionState.CHAMPION)
    hidden = explorer.settings.job_dir / "hidden"

    def out_of_sight(number: int) -> tuple[Path, str]:
        path, sha256 = publish(CheckpointStore(explorer.settings.job_dir), number)
        path.rename(hidden)
        return path, sha256

    training = explorer.ledger.training
    training.register(training.take_epoch("trainer"), [], step=1, publish=out_of_sight)
    eventually(lambda: alarms(explorer) == [UNREADABLE])
    return hidden


def test_no_count_of_tries_rejects_a_version_and_it_is_taken_up_when_its_folder_is_back(
    explorer: RunningExplorer, away: Path
) -> None:
    for _ in range(8):
        explorer.until_looked()
    assert version(explorer, 3).state is VersionState.CANDIDATE
    assert explorer.version() == 2
    [alarm] = explorer.ledger.alarms.all()
    assert str(version(explorer, 3).path) in alarm.reason
    assert "`tuneloop versions promote`" in alarm.reason
    away.rename(version(explorer, 3).path)
    until(explorer, 3, VersionState.CHAMPION)
    eventually(lambda: alarms(explorer) == [])


def test_an_alarm_about_a_version_that_nobody_waits_for_any_more_is_cleared(
    explorer: RunningExplorer, away: Path
) -> None:
    explorer.ledger.versions.reject(3, "it is lost", by="anna")
    eventually(lambda: alarms(explorer) == [])


def test_another_version_can_be_promoted_while_the_newest_is_away(explorer: RunningExplorer, away: Path) -> None:
    explorer.ledger.versions.appoint(1, instead_of=2, by="anna", reason="the newest is lost")
    eventually(lambda: explorer.version() == 1)
    assert version(explorer, 3).state is VersionState.CANDIDATE


def test_a_deleted_champion_is_waited_for_until_another_is_promoted(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    for number in (1, 2):
        candidate(explorer)
        until(explorer, number, VersionState.CHAMPION)
    shutil.rmtree(version(explorer, 2).path)
    double.resets = True
    eventually(lambda: explorer.services.fleet.engines[0].state is EngineState.DOWN)
    double.resets = False
    eventually(lambda: alarms(explorer) == [UNREADABLE])
    assert explorer.ledger.versions.champion().version == 2
    explorer.ledger.versions.appoint(1, instead_of=2, by="anna", reason="version 2 is lost")
    until_ready(explorer, 1)
    assert explorer.version() == 1
    eventually(lambda: alarms(explorer) == [])


# What the verifier says.


class Watched(type(Path())):  # type: ignore[misc]
    """A path below which something happens when a file is opened for the n-th time."""

    happens: Callable[[str, int], None] = staticmethod(lambda name, times: None)
    opened: dict[str, int] = {}  # noqa: RUF012 - of the class, for paths are made anew all the time

    def open(self, *arguments: Any, **named: Any) -> Any:
        self.opened[self.name] = self.opened.get(self.name, 0) + 1
        type(self).happens(self.name, self.opened[self.name])
        return super().open(*arguments, **named)


def verified(folder: Path, happens: Callable[[str, int], None]) -> None:
    path, sha256 = publish(CheckpointStore(folder / "job"), 1)
    base = write_model(folder / "base")

    class Checkpoint(Watched):
        opened: dict[str, int] = {}  # noqa: RUF012

    Checkpoint.happens = staticmethod(happens)
    verify(Checkpoint(path), manifest_sha256=sha256, version=1, base=base)


#: Files, and which time they are opened: to be compared with the manifest, and to be understood.
OPENED = [("manifest.json", 1), ("config.json", 1), ("model.safetensors", 1), ("config.json", 2)]
OPENED += [("model.safetensors", 2)]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("at", OPENED, ids=lambda at: f"{at[0]} {at[1]}")
def test_a_disk_that_does_not_answer_is_no_damage(tmp_path: Path, at: tuple[str, int], number: int) -> None:
    def fail(name: str, times: int) -> None:
        if (name, times) == at:
            raise OSError(number, os.strerror(number))

    with pytest.raises(CheckpointUnreadable, match=os.strerror(number)):
        verified(tmp_path, fail)


@pytest.mark.parametrize("at", OPENED, ids=lambda at: f"{at[0]} {at[1]}")
def test_a_folder_that_goes_away_while_it_is_read_is_no_damage(tmp_path: Path, at: tuple[str, int]) -> None:
    def unmount(name: str, times: int) -> None:
        if (name, times) == at:
            (tmp_path / "job").rename(tmp_path / "unmounted")
            (tmp_path / "job").mkdir()

    with pytest.raises(CheckpointUnreadable, match="No such file"):
        verified(tmp_path, unmount)


async def test_a_verifier_that_hangs_is_killed_and_says_nothing_of_the_version(tmp_path: Path) -> None:
    path, sha256 = publish(CheckpointStore(tmp_path / "job"), 1)
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    began = time.monotonic()
    with pytest.raises(CheckpointUnreadable, match="did not end within 1 s"):
        await verify_in_process(version_at(path, sha256), Verifier(write_model(tmp_path / "base"), tmp_path / "job", 1))
    assert time.monotonic() - began < 30
