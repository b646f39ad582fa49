"""Symbolic links where files of the job folder should be: what they name is never read, nor written to."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.explorer.running import open_ledger, settings_for
from tests.factories import feedback, outboxed
from tuneloop.explorer.access.key_watch import KeyWatch
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.engines.process import EngineProcess
from tuneloop.explorer.processes.patient_ledger import ServedVersions, recall_versions, remember
from tuneloop.shared.errors import EnvironmentRefused, LedgerUnavailable, TuneloopError
from tuneloop.shared.experience import VersionState
from tuneloop.shared.held_files import read_unlinked
from tuneloop.shared.job_marks import load_key, note_registered, registered_in
from tuneloop.shared.ledger.keys import KeyTable
from tuneloop.shared.ledger.ledger import Version
from tuneloop.shared.outbox_status import outbox_status, path_of


def replaced_by_link(path: Path) -> None:
    """The same bytes, elsewhere."""
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def refused(read: Callable[[], object]) -> None:
    with pytest.raises(OSError, match="a link, which is not followed"):
        read()


def test_a_file_is_read_and_a_link_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    assert read_unlinked(tmp_path / "a") == b"x"
    replaced_by_link(tmp_path / "a")
    refused(lambda: read_unlinked(tmp_path / "a"))


async def test_an_engine_does_not_log_through_a_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x")
    settings = settings_for(tmp_path)
    log = settings.job_dir / "logs" / "engine-0.log"
    log.parent.mkdir(parents=True)
    log.symlink_to(other)
    with pytest.raises(EnvironmentRefused, match="a link, which is not followed"):
        await EngineProcess(settings, Engine(0, EngineHttp()), socket=tmp_path / "s").start(tmp_path)
    assert other.read_bytes() == b"x"


def test_a_file_of_an_outbox_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    file = path_of(tmp_path, outboxed(tmp_path, feedback()))
    assert outbox_status(tmp_path, {}).records == 1
    replaced_by_link(file)
    with pytest.raises(OSError, match="symbolic links"):
        outbox_status(tmp_path, {})


def test_marks_and_keys_that_are_links_say_nothing(tmp_path: Path) -> None:
    note_registered(tmp_path, 3, 2)
    assert registered_in(tmp_path).version == 3
    replaced_by_link(tmp_path / "registered.json")
    assert registered_in(tmp_path).version == 0
    key = tmp_path / "secrets" / "msg_id.key"
    load_key(key)
    replaced_by_link(key)
    with pytest.raises((OSError, TuneloopError), match="link"):
        load_key(key)


def test_keys_that_are_a_link_let_nobody_in_while_the_database_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path)
    ledger = open_ledger(settings)

    def away() -> KeyTable:
        raise LedgerUnavailable("away")

    monkeypatch.setattr(ledger.keys, "table", away)
    watch, remembered = KeyWatch(settings, ledger.keys), settings.job_dir / "keys.json"
    remembered.parent.mkdir(parents=True, exist_ok=True)
    remembered.write_bytes(b'{"keys": [], "in_force": false}')
    watch.open()
    assert not watch.table.in_force
    replaced_by_link(remembered)
    watch.open()
    assert watch.table.in_force
    ledger.close()


def test_what_was_served_last_is_not_read_through_a_link(tmp_path: Path) -> None:
    version = Version(0, VersionState.CHAMPION, 0, tmp_path, None, 0, 0.0, None, None)
    remember(tmp_path / "served.json", ServedVersions(str(tmp_path), version, version))
    assert recall_versions(tmp_path / "served.json", tmp_path) is not None
    replaced_by_link(tmp_path / "served.json")
    assert recall_versions(tmp_path / "served.json", tmp_path) is None
