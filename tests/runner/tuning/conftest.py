"""An explorer over an engine double that trains as those do that tune() starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.running import RunningExplorer, explorer_running, settings_for


@pytest.fixture
def explorer(tmp_path: Path, double: EngineDouble) -> Iterator[RunningExplorer]:
    """An explorer whose batches are what one commit released."""
    settings = settings_for(tmp_path, [double.url])
    buffer = settings.buffer.model_copy(update={"batch_timeout": 0.05})
    with explorer_running(settings.model_copy(update={"buffer": buffer})) as running:
        yield running
