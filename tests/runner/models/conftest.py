"""An explorer over an engine double, for models that are bound to runs there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.engine import EngineDouble, engine_place
from tests.explorer.running import RunningExplorer, explorer_running, settings_for


@pytest.fixture
def double() -> Iterator[EngineDouble]:
    """An engine."""
    with engine_place() as place:
        yield place.fresh()


@pytest.fixture
def explorer(tmp_path: Path, double: EngineDouble) -> Iterator[RunningExplorer]:
    """An explorer with that engine, which forgets nothing."""
    with explorer_running(settings_for(tmp_path, [double.url])) as running:
        yield running
