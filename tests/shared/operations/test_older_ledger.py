"""A database that was put back alone is told from its checkpoints, on either database."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.explorer.checkpoints import register
from tests.shared.operations.test_backup import BOTH, Bench, Experiment, bench, source
from tuneloop.shared.job_marks import note_registered
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import dump
from tuneloop.shared.operations.backup import back_up
from tuneloop.shared.operations.older_ledger import LEDGER_OLDER, adopt, find_lost_versions, report_older
from tuneloop.shared.settings.settings import Settings

__all__ = ["bench", "source"]


def put_back(bench: Bench, settings: Settings, backup: Path) -> None:
    bench.drop(settings)
    schema, source = (
        settings.buffer.trainer_input.experience_buffer.name,
        backup / dump.dump_name(settings.database_url),
    )
    base = settings.model.model_path.absolute()
    dump.load(settings.database_url, schema=schema, source=source, base=base, folder=settings.job_dir)


@pytest.mark.parametrize("bench", BOTH, indirect=True)
def test_versions_that_the_database_lost_are_told_and_their_numbers_left_out(
    source: Experiment, bench: Bench, tmp_path: Path
) -> None:
    settings, ledger = source.settings, source.ledger
    back_up(settings, tmp_path / "backup")
    register(ledger, source.job)
    note_registered(source.job, *ledger.restoration.numbers())
    assert find_lost_versions(source.job, ledger) is report_older(source.job, ledger) is None
    ledger.close()
    put_back(bench, settings, tmp_path / "backup")
    with closing(Ledger.of(settings)) as older:
        told = report_older(source.job, older) or ""
        assert "knows versions up to 2 and trainers up to epoch" in told
        assert "but version 3 and epoch 4 were registered" in told
        assert "`tuneloop restore`" in told
        assert "`tuneloop db adopt`" in told
        assert [(each.name, each.reason) for each in older.alarms.all()] == [(LEDGER_OLDER, told)]
        assert adopt(source.job, older) == 2001
        assert find_lost_versions(source.job, older) is None
        assert older.alarms.all() == []
        assert older.reports.audit() == []
        assert register(older, source.job) == 2001
