"""The explorer tells a trainer that wants to yield whether requests are being answered."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for
from tests.explorer.wire import Wire, http_request
from tuneloop.shared.job_marks import TRAFFIC_S, traffic_stamp


@pytest.fixture(params=[True, False], ids=["asked", "not asked"])
def asked(request: pytest.FixtureRequest) -> bool:
    """Whether the trainer is to yield."""
    return bool(request.param)


@pytest.fixture
def explorer(tmp_path: Path, double: EngineDouble, asked: bool) -> Iterator[RunningExplorer]:
    """An explorer of settings that say so."""
    settings = settings_for(tmp_path, [double.url])
    trainer = settings.trainer.model_copy(update={"yield_to_traffic": asked})
    with explorer_running(settings.model_copy(update={"trainer": trainer})) as running:
        yield running


def changed(explorer: RunningExplorer, stamp: int) -> bool:
    return traffic_stamp(explorer.settings.job_dir) != stamp


def test_the_mark_is_touched_as_long_as_a_request_is_in_flight(
    explorer: RunningExplorer, double: EngineDouble, asked: bool
) -> None:
    double.hangs = True
    before = traffic_stamp(explorer.settings.job_dir)
    with Wire(explorer.url) as wire:
        wire.send(http_request())
        eventually(lambda: explorer.services.proxy.admission.in_flight == 1)
        if not asked:
            time.sleep(3 * TRAFFIC_S)
            assert not changed(explorer, before)
            return
        for _ in range(2):
            eventually(partial(changed, explorer, before))
            before = traffic_stamp(explorer.settings.job_dir)
        double.hangs = False
        assert wire.response().status == 200
    eventually(lambda: explorer.services.proxy.admission.in_flight == 0)
    time.sleep(2 * TRAFFIC_S)  # a turn may have begun before
    last = traffic_stamp(explorer.settings.job_dir)
    time.sleep(3 * TRAFFIC_S)
    assert not changed(explorer, last)
