"""What the runner's tests share: explorers over engine doubles, and a service that takes feedback as a test says."""

import logging
from collections.abc import Iterator

import pytest

from tests.explorer.conftest import double, doubles, explorer, places, running_explorer
from tests.runner.feedback.service import FeedbackService, feedback_service

__all__ = ["double", "doubles", "explorer", "places", "running_explorer"]


@pytest.fixture
def service(caplog: pytest.LogCaptureFixture) -> Iterator[FeedbackService]:
    with caplog.at_level(logging.CRITICAL), feedback_service() as found:
        yield found
