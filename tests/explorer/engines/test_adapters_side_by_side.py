"""Two adapters on one engine: it has two places for a version, and all that needs two engines does with one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble, EnginePlace
from tests.explorer.engines.test_adapters import adapted, candidate, until
from tests.explorer.running import RunningExplorer, eventually, explorer_running
from tests.explorer.versions.test_reload import until_ready
from tests.explorer.versions.test_trial import SHARE, answered, by_hash
from tuneloop.explorer.engines.fleet import EngineState
from tuneloop.shared.experience import VersionState
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import RolloutSettings

Start = Callable[[Settings], RunningExplorer]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def run(settings: Settings) -> RunningExplorer:
            running = stack.enter_context(explorer_running(settings))
            until_ready(running, 2)
            return running

        yield run


def tried(tmp_path: Path, double: EngineDouble, **rollout: Any) -> Settings:
    return adapted(tmp_path, double).model_copy(
        update={"rollout": RolloutSettings(**{"mode": "canary", "share": SHARE} | rollout)}
    )


def test_a_version_is_tried_beside_the_champion_and_rolled_back(
    start: Start, tmp_path: Path, double: EngineDouble
) -> None:
    explorer = start(tried(tmp_path, double))
    candidate(explorer)
    until(explorer, 1, VersionState.CANARY)
    until_ready(explorer, 2)
    assert answered(explorer) == by_hash()
    request = {str(each.body["user"]): str(each.body["model"]) for each in double.chats if "user" in each.body}
    assert {user: name.startswith("tuneloop-adapter-1-") for user, name in request.items()} == {
        user: bool(version) for user, version in by_hash().items()
    }
    assert not {"/pause", "/collective_rpc"} & set(double.posts)
    explorer.ledger.versions.roll_back(1, by="admin:anna", reason="to see")
    eventually(lambda: explorer.services.fleet.split is None)
    until_ready(explorer, 2)
    assert set(answered(explorer).values()) == {0}


def test_an_engine_that_was_started_again_gets_the_champion_s_adapter(
    tmp_path: Path, places: list[EnginePlace], start: Start
) -> None:
    explorer = start(tried(tmp_path, places[0].fresh()))
    candidate(explorer)
    until(explorer, 1, VersionState.CANARY)
    explorer.ledger.versions.promote(1, by="admin:anna", reason="to see")
    eventually(lambda: [each.version for each in explorer.services.fleet.engines] == [1, 1])
    places[0].fresh().dead = True
    eventually(lambda: {each.state for each in explorer.services.fleet.engines} == {EngineState.DOWN})
    again = places[0].fresh()
    until_ready(explorer, 2)
    assert explorer.version() == 1
    assert str(again.chats[-1].body["model"]).startswith("tuneloop-adapter-1-")
