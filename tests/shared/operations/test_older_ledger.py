"""A database that was put back alone is told from its checkpoints and its spool, on either database."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.explorer.checkpoints import register
from tests.factories import exchange, feedback
from tests.shared.operations.test_backup import BOTH, Bench, Experiment, bench, source
from tuneloop.explorer.capture.spool_slots import FlushedMark
from tuneloop.shared import steady_time
from tuneloop.shared.experience import encode
from tuneloop.shared.job_marks import note_registered
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import dump
from tuneloop.shared.operations.backup import back_up
from tuneloop.shared.operations.older_ledger import LEDGER_OLDER, adopt, find_older, report_older
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.spool_format import Position, segment_path

__all__ = ["bench", "source"]


def put_back(bench: Bench, settings: Settings, backup: Path) -> None:
    """Put back the database alone, as pg_restore does or who copies a file."""
    bench.drop(settings)
    schema, source = (
        settings.buffer.trainer_input.experience_buffer.name,
        backup / dump.dump_name(settings.database_url),
    )
    base = settings.model.model_path.absolute()
    dump.load(settings.database_url, schema=schema, source=source, base=base, folder=settings.job_dir)


@pytest.mark.parametrize("bench", BOTH, indirect=True)
def test_versions_and_replies_that_the_database_lost_are_told(source: Experiment, bench: Bench, tmp_path: Path) -> None:
    settings, ledger = source.settings, source.ledger
    back_up(settings, tmp_path / "backup")
    said = exchange(msg_id="chatcmpl-lost")
    records = [said, feedback(msg_id=said.msg_id)]
    source.spool(*map(encode, records))
    ledger.recording.record(records)
    slot = settings.spool_dir / "0"
    with closing(FlushedMark(slot / "flushed")) as mark:
        mark.move(Position(1, segment_path(slot, 1).stat().st_size))
    register(ledger, source.job)
    note_registered(source.job, *ledger.restoration.numbers())
    assert find_older(settings, ledger) == []
    assert report_older(settings, ledger) == []
    ledger.close()
    put_back(bench, settings, tmp_path / "backup")
    with closing(Ledger.of(settings)) as older:
        versions, replies = report_older(settings, older)
        assert "knows versions up to 2 and trainers up to epoch" in versions
        assert "but version 3 and epoch 4 were registered" in versions
        assert "the last replies that it took from 1 slot are not in it" in replies
        assert all("`tuneloop restore`" in each and "`tuneloop db adopt`" in each for each in (versions, replies))
        assert [each.name for each in older.alarms.all()] == [LEDGER_OLDER]
        segment_path(slot, 1).unlink()  # as an explorer does that goes on
        assert len(find_older(settings, older)) == 2
        assert adopt(settings, older) == (2, 0, 2001)
        assert older.restoration.absent([said.msg_id]) == set()
        assert find_older(settings, older) == older.alarms.all() == []
        assert older.reports.audit() == []
        assert register(older, source.job) == 2001


@pytest.mark.parametrize("erased", [False, True])
def test_a_database_that_deleted_the_last_replies_is_no_older_one(source: Experiment, erased: bool) -> None:
    settings, ledger, slot = source.settings, source.ledger, source.settings.spool_dir / "0"
    said = exchange(user="ann")
    source.spool(encode(said))
    ledger.recording.record([said])
    with closing(FlushedMark(slot / "flushed")) as mark:
        mark.move(Position(1, segment_path(slot, 1).stat().st_size))
    if erased:
        ledger.retention.erase(said.tenant, "ann")
    else:
        ledger.stored.delete(said.tenant, said.msg_id)
    assert find_older(settings, ledger) == report_older(settings, ledger) == []


def test_what_several_workers_heard_is_offered_again_in_the_order_in_which_it_was_said(
    source: Experiment, bench: Bench, tmp_path: Path
) -> None:
    settings, ledger = source.settings, source.ledger
    back_up(settings, tmp_path / "backup")
    said, others = exchange(), exchange()
    rated, corrected = (feedback(msg_id=said.msg_id, value=value, stamp=steady_time.stamp()) for value in (0.0, 1.0))
    by_slot = {"0": [said, corrected], "1": [others, rated]}
    for slot, records in by_slot.items():
        source.spool(*map(encode, records), slot=slot)
        with closing(FlushedMark(settings.spool_dir / slot / "flushed")) as mark:
            mark.move(Position(1, segment_path(settings.spool_dir / slot, 1).stat().st_size))
    ledger.recording.record([said, others, rated, corrected])
    ledger.close()
    put_back(bench, settings, tmp_path / "backup")
    with closing(Ledger.of(settings)) as older:
        assert adopt(settings, older)[:2] == (4, 0)
        (history,) = [view.replies[0] for view in [older.exchange_views.get(said.tenant, said.msg_id)] if view]
        assert history.reward == 1.0
