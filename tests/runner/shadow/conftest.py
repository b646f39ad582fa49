"""Services for shadow runs: a real explorer, and one that takes feedback as a test wants."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.engine import engine_place
from tests.explorer.running import RunningExplorer, explorer_running, settings_for
from tests.runner.feedback.service import FeedbackService, feedback_service


@pytest.fixture
def explorer(tmp_path: Path) -> Iterator[RunningExplorer]:
    with engine_place() as place, explorer_running(settings_for(tmp_path, [place.fresh().url])) as running:
        yield running


@pytest.fixture
def service(caplog: pytest.LogCaptureFixture) -> Iterator[FeedbackService]:
    with caplog.at_level(logging.CRITICAL), feedback_service() as double:
        yield double
