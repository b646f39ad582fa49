"""Database and explorer go away in the middle of a trial, alone and together, and it goes on where it was.

Explorer and PostgreSQL are real, and are processes; the engines are doubles.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles import postgres
from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.checkpoints import register
from tests.explorer.test_main import write_settings
from tests.loop.harness.regulars import USERS, Regulars
from tests.loop.harness.services import Service, free_port, ledger_of, wait_for
from tests.loop.harness.trials import Stage
from tuneloop.shared.experience import VersionState

pytestmark = pytest.mark.postgres


@pytest.fixture
def stage(tmp_path: Path, doubles: list[EngineDouble]) -> Iterator[Stage]:
    """Version 1 is the champion, and 2 is tried."""
    server = postgres.started()
    for each in doubles:
        each.piece_pause_s = 0.005
    config = write_settings(
        tmp_path,
        explorer__rollout_model__engine_urls=[each.url for each in doubles],
        explorer__proxy_port=free_port(),
        explorer__service_status_check_interval=0.1,
        buffer__trainer_input__experience_buffer__path=server.url,
        rollout__mode="canary",
        rollout__share=0.4,
        rollout__latency=None,
    )
    service = Service(config, "explorer")
    service.wait_until_ready()
    ledger = ledger_of(service.settings)
    with Regulars(service.url, MODEL) as users:
        found = Stage(config, server, service, ledger, users)
        found.until_ready()
        register(ledger, service.settings.job_dir)
        found.until(1, VersionState.CANARY)
        ledger.versions.appoint(1, instead_of=0, by="admin:anna", reason="it is better")
        found.until_it_alone_answers(1)
        found.until_ready()
        register(ledger, service.settings.job_dir)
        found.until(2, VersionState.CANARY)
        yield found
    assert found.service.stop() == 0
    assert ledger.reports.imbalance() == []
    ledger.close()
    server.close()


def test_what_is_tried_is_tried_on_whoever_was_away(stage: Stage, doubles: list[EngineDouble]) -> None:
    began = stage.until_it_answers(2)
    stage.server.stop("immediate")
    stage.serve(2 * len(USERS))
    stage.server.start()
    stage.serve(len(USERS))
    stage.assert_it_got_its_share_and_no_more(2, began, time.time())

    killed = time.time()
    stage.kill_and_start_again()
    stage.until_it_answers(2)
    stage.serve(len(USERS))

    stage.server.stop("immediate")
    stage.kill_and_start_again()
    stage.serve(len(USERS))
    assert {each.version for each in stage.users.since(stage.gaps[-1][1])} == {1}, "it cannot know what is tried"
    stage.server.start()
    again = stage.until_it_answers(2)
    assert {each.version for each in stage.users.since(killed)} == {1, 2}
    assert stage.actions(2) == ["published", "canary"]
    stage.serve(len(USERS))

    stage.users.worth = {1: 0.9, 2: 0.1}
    ended = stage.until(2, VersionState.ROLLED_BACK)
    assert "it earns less" in (ended.reason or "")
    stage.assert_it_got_its_share_and_no_more(2, again, ended.at)
    wait_for(lambda: {each.weights.parent.name for each in doubles} == {"global_step_1"}, why="one was not put back")
    stage.until_it_alone_answers(1)
    assert stage.failures() == []
