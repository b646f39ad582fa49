"""What the explorer deletes by itself."""

import time
from contextlib import suppress
from pathlib import Path

from tests.doubles.engine import EngineDouble
from tests.explorer.running import RunningExplorer, eventually, explorer_running, open_ledger, settings_for
from tests.factories import exchange
from tuneloop.cli.erasure import erase
from tuneloop.shared.experience import State
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


def test_retention_is_applied_by_the_explorer(tmp_path: Path, double: EngineDouble) -> None:
    settings = settings_for(tmp_path, [double.url])
    ledger = open_ledger(settings)
    ledger.recording.record([exchange(received_at=1.0), exchange(received_at=time.time())])
    ledger.close()
    with explorer_running(settings.model_copy(update={"retention": RetentionSettings(recorded=60.0)})) as explorer:
        eventually(lambda: explorer.metrics()["tuneloop_purged_total"] == 1)
        assert explorer.counts()[State.RECORDED] == 1
