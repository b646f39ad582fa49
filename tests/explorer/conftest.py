"""What the explorer's tests share: engine doubles, and explorers attached to them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble, EnginePlace, engine_place
from tests.doubles.verifier import start_warm_verifier
from tests.explorer.running import RunningExplorer, explorer_running, settings_for
from tuneloop.explorer.versions import loading, policy_serving, reload

Run = Callable[..., RunningExplorer]


@pytest.fixture(scope="session", autouse=True)
def warm_verifier() -> Iterator[None]:
    """Explorers of this process verify without starting Python first, or ahead."""

    async def start_none() -> None:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "start_verifier", start_warm_verifier)
        for module in (reload, policy_serving):
            patch.setattr(module, "start_verifier_ahead", start_none)
        yield


@pytest.fixture(scope="session")
def places() -> Iterator[list[EnginePlace]]:
    """Two places for engines."""
    with engine_place() as first, engine_place() as second:
        yield [first, second]


@pytest.fixture
def doubles(places: list[EnginePlace]) -> list[EngineDouble]:
    """Two engines."""
    return [place.fresh() for place in places]


@pytest.fixture
def double(doubles: list[EngineDouble]) -> EngineDouble:
    """An engine, the first of the two."""
    return doubles[0]


@contextmanager
def one_explorer(tmp_path: Path) -> Iterator[Run]:
    """Starts explorers over engine doubles, until the block ends; keyword arguments are settings of `explorer`."""
    with ExitStack() as stack:

        def run(*engines: EngineDouble, **explorer: Any) -> RunningExplorer:
            settings = settings_for(tmp_path, [each.url for each in engines], **explorer)
            return stack.enter_context(explorer_running(settings))

        yield run


@pytest.fixture
def running_explorer(tmp_path: Path) -> Iterator[Run]:
    with one_explorer(tmp_path) as run:
        yield run


@pytest.fixture
def explorer(running_explorer: Run, double: EngineDouble) -> RunningExplorer:
    """An explorer with one engine."""
    return running_explorer(double)
