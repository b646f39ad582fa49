"""An explorer while a version is tried."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.checkpoints import register
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for

KEY = "a-key-that-nobody-guesses"


@pytest.fixture
def trying(tmp_path: Path, doubles: list[EngineDouble]) -> Iterator[RunningExplorer]:
    """Version 0 is the champion, version 1 is tried; pins are allowed."""
    urls = [each.url for each in doubles]
    rollout = {"mode": "canary", "share": 0.25}
    with ExitStack() as stack:
        settings = settings_for(tmp_path, urls, rollout=rollout, version_pins=True, admin_key=KEY)
        explorer = stack.enter_context(explorer_running(settings))
        register(explorer.ledger, settings.job_dir)
        eventually(lambda: sorted(each.version for each in explorer.services.fleet.engines) == [0, 1])
        eventually(lambda: explorer.chat(model=f"{MODEL}@1").status_code == 200)
        yield explorer
