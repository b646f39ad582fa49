"""A version that goes wrong while an engine is loading it never answers, and what answered before goes on."""

import shutil
from pathlib import Path

import pytest

from tests import factories
from tests.doubles.engine import EngineDouble
from tests.explorer.checkpoints import publish, register
from tests.explorer.conftest import Run
from tests.explorer.running import RunningExplorer, eventually
from tests.explorer.versions.test_reload import (
    actor,
    all_ready,
    candidate,
    model,
    rejected,
    until,
    until_ready,
    version,
)
from tuneloop.explorer.engines.fleet import EngineState
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.experience import VersionAction, VersionState


class Vanishing(set[str]):
    """Checkpoints that are deleted just when an engine has loaded half of them."""

    def __init__(self, double: EngineDouble, path: Path) -> None:
        super().__init__({path.name})
        self._double, self._path = double, path

    def __contains__(self, name: object) -> bool:
        if name != self._path.name:
            return False
        shutil.rmtree(self._path, ignore_errors=True)
        self._double.weights = Path("/half/loaded")
        return True


@pytest.mark.contract
def test_a_folder_that_is_gone_while_it_is_loaded_is_not_rejected_and_the_old_weights_serve_on(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.refuses_load_of = Vanishing(double, explorer.settings.job_dir / "global_step_1")
    candidate(explorer)
    eventually(lambda: [each.name for each in explorer.ledger.alarms.all()] == ["version_unreadable"])
    until_ready(explorer, 1)
    assert (double.weights, double.paused, explorer.version()) == (model(explorer), False, 0)
    assert version(explorer, 1).state is VersionState.CANDIDATE
    candidate(explorer)
    until(explorer, 2, VersionState.CHAMPION)
    assert double.weights == actor(explorer, 2)
    eventually(lambda: explorer.ledger.alarms.all() == [])


@pytest.mark.contract
def test_a_version_outside_of_the_experiment_s_folder_is_not_served_and_not_rejected(
    explorer: RunningExplorer, double: EngineDouble, tmp_path: Path
) -> None:
    register(explorer.ledger, tmp_path / "elsewhere")
    eventually(lambda: explorer.ledger.alarms.all() != [])
    [alarm] = explorer.ledger.alarms.all()
    assert "give all services the same checkpoint_root_dir" in alarm.reason
    assert version(explorer, 1).state is VersionState.CANDIDATE
    assert (explorer.version(), double.posts) == (0, [])


def test_a_link_to_a_version_is_refused(explorer: RunningExplorer, double: EngineDouble, tmp_path: Path) -> None:
    def linked(version: int) -> tuple[Path, str]:
        path, sha256 = publish(CheckpointStore(tmp_path / "elsewhere"), version)
        link = explorer.settings.job_dir / path.name
        link.symlink_to(path)
        return link, sha256

    epoch, samples = factories.leased(explorer.ledger)
    explorer.ledger.training.register(epoch, factories.ids(samples), step=1, publish=linked)
    rejected(explorer, 1, "is a link")
    assert (explorer.version(), double.posts) == (0, [])


@pytest.mark.contract
def test_an_engine_that_dies_of_a_folder_that_is_gone_comes_back_with_the_old_weights(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.dies_of = Vanishing(double, explorer.settings.job_dir / "global_step_1")
    candidate(explorer)
    eventually(lambda: explorer.services.fleet.engines[0].state == EngineState.DOWN)
    double.dead = double.paused = False
    until_ready(explorer, 1)
    explorer.until_looked()
    assert (explorer.version(), double.weights) == (0, model(explorer))
    assert version(explorer, 1).state is VersionState.CANDIDATE
    assert "its manifest cannot be read" in explorer.ledger.alarms.all()[0].reason


def damage(explorer: RunningExplorer, number: int) -> None:
    """Cut the last byte of a version's weights off."""
    weights = next(actor(explorer, number).glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])


def test_a_damaged_version_is_not_gone_back_to_but_the_newest_whole_one(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    for number in (1, 2, 3):
        candidate(explorer)
        until(explorer, number, VersionState.CHAMPION)
    damage(explorer, 2)
    explorer.ledger.versions.roll_back(3, by="anna", reason="it swears")
    eventually(lambda: double.weights == actor(explorer, 1) and explorer.version() == 1)
    assert version(explorer, 2).state == VersionState.RETIRED
    event = explorer.ledger.versions.events(1)[-1]
    assert (event.action, event.actor) == (VersionAction.PROMOTED, "explorer")
    assert "version 2, the champion, is damaged: global_step_2/actor/model.safetensors" in (event.reason or "")
    [alarm] = explorer.ledger.alarms.all()
    assert (alarm.name, alarm.version, alarm.holds) == ("champion_damaged", 2, False)
    assert "version 1 answers in its place" in alarm.reason
    candidate(explorer)
    until(explorer, 4, VersionState.CHAMPION)
    assert double.weights == actor(explorer, 4)


def test_an_explorer_that_starts_with_a_damaged_champion_serves_the_one_before(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    for number in (1, 2):
        candidate(explorer)
        until(explorer, number, VersionState.CHAMPION)
    shutil.rmtree(actor(explorer, 1))
    damage(explorer, 2)
    double.resets = True
    eventually(lambda: explorer.services.fleet.engines[0].state == EngineState.DOWN)
    double.resets = False
    until_ready(explorer, 1)
    assert (explorer.version(), double.weights) == (0, model(explorer))
    assert [each.name for each in explorer.ledger.alarms.all()] == ["champion_damaged"]


def test_what_is_rejected_meanwhile_gets_no_further_engine(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    explorer = all_ready(running_explorer, doubles)
    for each in doubles:
        each.weights = model(explorer)
    doubles[0].load_s = 1.0
    candidate(explorer)
    eventually(lambda: doubles[0].loading == 1)
    explorer.ledger.versions.reject(1, "an administrator says so")
    eventually(lambda: doubles[0].posts.count("/collective_rpc") == 2)
    until_ready(explorer, 2)
    assert [each.weights for each in doubles] == [model(explorer)] * 2
    assert "/collective_rpc" not in doubles[1].posts
    assert explorer.version() == 0
