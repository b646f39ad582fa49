import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.operations.conftest import Run
from tests.factories import exchange, feedback, outboxed, refuse, take
from tuneloop.shared.errors import TuneloopError
from tuneloop.shared.experience import Exchange, encode
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.outbox_status import outbox_status
from tuneloop.shared.settings.loader import OVERRIDES_VARIABLE
from tuneloop.shared.settings.settings import Settings


@pytest.fixture
def said(ledger: Ledger) -> Exchange:
    said = exchange(request=b"the text of a user")
    refuse(ledger, "1-a-b", encode(said), encode(feedback(msg_id=said.msg_id)))
    refuse(ledger, "2-a-b", b"damaged", reason="damaged")
    return said


def names(run: Run) -> list[str]:
    return [each["name"] for each in json.loads(run("outbox", "list", "--json").stdout)["refused"]]


def test_what_waits_is_listed_by_file(run: Run, settings: Settings, ledger: Ledger, tmp_path: Path) -> None:
    assert run("outbox", "list").stdout == "nothing waits, and nothing was refused\n"
    now = ledger.transactions.time()
    done = outboxed(settings.outbox_dir, feedback())
    half = outboxed(settings.outbox_dir, feedback(), exchange(received_at=now - 600))
    elsewhere = outboxed(tmp_path / "volume", feedback(received_at=now))
    take(ledger, done, 1)
    take(ledger, half, 1)
    first, second = run("outbox", "list").stdout.splitlines()
    assert first == f"{done}  all in the database"
    assert second.startswith(f"{half}  1 record, ")
    assert second.endswith("bytes not in the database yet, the oldest for 10 min")
    [line] = run("outbox", "list", tmp_path / "volume").stdout.splitlines()
    assert line.startswith(f"{elsewhere}  1 record, ")
    found = json.loads(run("outbox", "list", "--json").stdout)["files"]
    assert [(each["file"], each["records"]) for each in found] == [(done, 0), (half, 1)]


def test_what_was_refused_is_listed_without_its_text_and_shown_with_it(run: Run, said: Exchange) -> None:
    lines = run("outbox", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == names(run)
    assert lines[0].endswith(" bytes of 1-a-b, refused 1970-01-01 00:16:40 UTC: out of range")
    assert lines[2].endswith("  7 bytes of 2-a-b, refused 1970-01-01 00:16:40 UTC: damaged")
    assert "text of a user" not in "".join(lines)
    assert json.loads(run("outbox", "show", names(run)[0]).stdout)["msg_id"] == said.msg_id
    assert run("outbox", "show", names(run)[2]).stdout == '"ZGFtYWdlZA=="\n'
    with pytest.raises(TuneloopError, match="no refused record has the name abc"):
        run("outbox", "show", "abc")


def test_those_named_come_into_the_outbox_again_and_leave_the_database(
    run: Run, said: Exchange, settings: Settings
) -> None:
    assert said
    first, second, damaged = names(run)
    done = run("outbox", "retry", second)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"1 record in {settings.outbox_dir} again: an explorer there")
    assert names(run) == [first, damaged]
    assert outbox_status(settings.outbox_dir, {}).records == 1
    with pytest.raises(TuneloopError, match="no refused record has the name abc"):
        run("outbox", "retry", first, "abc")
    assert run("outbox", "retry").exit_code == run("outbox", "retry", first, "--all").exit_code == 2
    assert names(run) == [first, damaged]


def test_damaged_bytes_stay_where_they_are(run: Run, said: Exchange, settings: Settings) -> None:
    assert said
    damaged = names(run)[2]
    done = run("outbox", "retry", "--all")
    assert done.exit_code == 1
    assert done.stderr == f"{damaged}: damaged bytes, no record of this release\n"
    assert names(run) == [damaged]
    assert outbox_status(settings.outbox_dir, {}).records == 2


def test_a_left_over_folder_is_drained_by_the_explorers_code(
    run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Sequence[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: given.append(command))
    monkeypatch.delenv(OVERRIDES_VARIABLE, raising=False)
    run("outbox", "drain", tmp_path / "volume", "--set", "project=p")
    assert [command[1:] for command in given] == [
        ["-P", "-m", "tuneloop.explorer.drain_folder", str(file), str(tmp_path / "volume")]
    ]
    assert json.loads(os.environ.pop(OVERRIDES_VARIABLE)) == ["project=p"]
