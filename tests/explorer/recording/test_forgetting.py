"""What the explorer deletes by itself."""

import time
from contextlib import suppress
from pathlib import Path

import msgspec

from tests.doubles.engine import EngineDouble
from tests.explorer.running import RunningExplorer, eventually, explorer_running, open_ledger, settings_for
from tests.factories import exchange, outboxed
from tuneloop.cli.erasure import erase
from tuneloop.shared.experience import Exchange, State
from tuneloop.shared.outbox_status import path_of
from tuneloop.shared.settings.feedback import RetentionSettings


def holding(folder: Path, words: bytes = b"goldfinch") -> set[str]:
    """The files below a folder that hold the words."""
    found = set()
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # it has just been removed
            if path.is_file() and words in path.read_bytes():
                found.add(str(path.relative_to(folder)))
    return found


def test_nothing_of_a_person_is_left_in_the_job_folder(explorer: RunningExplorer) -> None:
    for user in ("ann", "bob"):
        said = explorer.chat(user=user, messages=[{"role": "user", "content": f"goldfinch of {user}"}]).json()["id"]
        explorer.feedback(said, comment=f"goldfinch of {user}")
    explorer.until_flushed()
    folder = explorer.settings.job_dir
    assert any(name.startswith("outbox/") for name in holding(folder, b"goldfinch of ann"))
    commandline = open_ledger(explorer.settings)
    erase(commandline, "default", "ann")
    commandline.close()
    eventually(lambda: holding(folder, b"goldfinch of ann") == set())
    assert explorer.counts()[State.REWARDED] == 1
    assert explorer.rows("SELECT user_id FROM exchanges") == [("bob",)]
    explorer.chat(user="ann", messages=[{"role": "user", "content": "hello again"}])
    assert explorer.rows("SELECT count(*) FROM exchanges WHERE user_id = 'ann'") == [(1,)]


def test_what_waited_of_a_person_who_was_erased_meanwhile_is_not_taken(explorer: RunningExplorer) -> None:
    explorer.ledger.recording.away = True
    explorer.chat(user="ann", messages=[{"role": "user", "content": "goldfinch"}])
    explorer.chat(user="bob")
    commandline = open_ledger(explorer.settings)
    erase(commandline, "default", "ann")
    commandline.close()
    explorer.ledger.recording.away = False
    eventually(lambda: holding(explorer.settings.job_dir) == set())
    eventually(lambda: explorer.rows("SELECT user_id FROM exchanges") == [("bob",)])


def damaged(folder: Path, record: Exchange) -> Path:
    """A file with one record, in which a bit has flipped."""
    path = path_of(folder, outboxed(folder, record))
    data = bytearray(path.read_bytes())
    data[6] ^= 1  # in its length
    path.write_bytes(data)
    return path


def test_nothing_of_a_person_is_left_wherever_it_lies(tmp_path: Path, double: EngineDouble) -> None:
    """In files that were drained, were closed, are open, or are damaged, and among what was refused, then and later."""
    settings = settings_for(tmp_path, [double.url])
    folder, outbox = settings.job_dir, settings.outbox_dir
    theirs = [exchange(tenant="default", user="ann", request=f'{{"x": "goldfinch {n}"}}'.encode()) for n in range(4)]
    outboxed(outbox, theirs[0], exchange())
    damaged(outbox, theirs[1])
    later = damaged(tmp_path / "later", theirs[2])  # as of a process that is killed only then
    with explorer_running(settings) as explorer:
        explorer.ledger.recording.refuses = lambda record: isinstance(record, Exchange) and record.priority == 7.0
        outboxed(outbox, msgspec.structs.replace(theirs[3], priority=7.0))
        said = explorer.chat(user="ann", messages=[{"role": "user", "content": "goldfinch"}]).json()["id"]
        explorer.feedback(said, comment="goldfinch")
        recording = explorer.ledger.recording
        eventually(lambda: len(recording.refused_records()) == 2)
        explorer.until_flushed()
        assert len([name for name in holding(folder) if name.startswith("outbox/")]) == 4
        assert any("ledger.db" in name for name in holding(folder))
        commandline = open_ledger(settings)
        erase(commandline, "default", "ann")
        commandline.close()
        eventually(lambda: holding(folder) == set())
        later.rename(outbox / later.name)
        eventually(lambda: [each.size for each in recording.refused_records()] == [0])
        explorer.until_flushed()
    with explorer_running(settings) as explorer:  # which reads all files that are kept once more
        explorer.until_flushed()
        eventually(lambda: holding(folder) == set())
        assert [each.size for each in explorer.ledger.recording.refused_records()] == [0]


def test_retention_is_applied_by_the_explorer(tmp_path: Path, double: EngineDouble) -> None:
    settings = settings_for(tmp_path, [double.url])
    ledger = open_ledger(settings)
    ledger.recording.record([exchange(received_at=1.0), exchange(received_at=time.time())])
    ledger.close()
    with explorer_running(settings.model_copy(update={"retention": RetentionSettings(recorded=60.0)})) as explorer:
        eventually(lambda: explorer.metrics()["tuneloop_purged_total"] == 1)
        assert explorer.counts()[State.RECORDED] == 1
