"""An explorer for the pages to talk to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.engine import engine_place
from tests.explorer.running import RunningExplorer, explorer_running, settings_for

ADMIN_KEY = "a-key-of-an-administrator-0123456789"


@pytest.fixture
def explorer(tmp_path: Path) -> Iterator[RunningExplorer]:
    with (
        engine_place() as place,
        explorer_running(settings_for(tmp_path, [place.fresh().url], admin_key=ADMIN_KEY)) as running,
    ):
        yield running
