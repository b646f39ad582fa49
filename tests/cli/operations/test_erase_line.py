"""A line of a file is erased: in the ledger, in the file itself, and in what was exported."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.operations.test_retention_commands import ran, told
from tests.factories import committed, exchange, feedback, ids, published, rewarded
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.finetuning.lines import read_lines
from tuneloop.shared.ledger.files import FILES, StoredFile
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.settings.settings import Settings

NAME = "file-abc"
LINES = [{"messages": [{"role": "user", "content": f"secret {number}"}]} for number in range(1, 13)]


@pytest.fixture
def stored(ledger: Ledger, settings: Settings) -> Path:
    path = settings.job_dir / FILES / NAME
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in LINES))
    row: dict[str, Any] = {"purpose": "fine-tune", "filename": "a", "sha256": "", "created_by": ""}
    row["bytes"] = path.stat().st_size
    ledger.files.add(StoredFile(id=NAME, tenant="acme", created_at=0.0, **row))
    return path


def rows_of_lines(ledger: Ledger) -> int:
    """A version that learnt from two rows of line 1, and replies to its prompt and to others'; the version."""
    committed(ledger, 1, msg_id=f"{NAME}:1:ftjob-x:0")
    committed(ledger, 1, msg_id=f"{NAME}:1:ftjob-x:1")
    epoch = ledger.training.take_epoch("trainer")
    version = ledger.training.register(
        epoch, ids(ledger.training.lease(epoch, 2, BatchRules())), step=1, publish=published
    )
    asked = exchange(task_id=f"{NAME}:1:ftjob-y:0", run_id="0")
    ledger.recording.record([asked, feedback(msg_id=asked.msg_id)])
    for name in (f"{NAME}:10:ftjob-x:0", f"{NAME}:11:ftjob-x:0", "file-abd:1:ftjob-x:0"):
        rewarded(ledger, 1, msg_id=name)
    ledger.recording.record(
        [
            exchange(task_id=f"{NAME}:12:ftjob-y:0", run_id="0"),
            exchange(tenant="other", task_id=f"{NAME}:1:ftjob-y:0", run_id="0"),
            exchange(),
        ]
    )
    return version


def test_a_line_goes_everywhere_and_no_other_moves(file: Path, ledger: Ledger, stored: Path) -> None:
    version = rows_of_lines(ledger)
    before = stored.read_bytes()
    command = ("erase", "-c", file, "--file", NAME, "--line", "1", "--json")
    planned = json.loads("".join(told(*command, "--dry-run")))
    assert stored.read_bytes() == before
    done = json.loads("".join(told(*command)))
    assert done == planned | {"dry_run": False}
    assert (done["tenant"], done["user"], done["exchanges"], done["experiences"]) == ("acme", f"{NAME}:1", 3, 3)
    assert done["feedback"] == 3
    assert done["versions"] == [{"version": version, "state": "candidate", "experiences": 2}]
    left = ledger.transactions.read(_names())
    names = {row.msg_id for row in left}
    assert len(names) == 6
    assert {each for each in names if each.startswith("file-")} == {
        f"{NAME}:10:ftjob-x:0",
        f"{NAME}:11:ftjob-x:0",
        "file-abd:1:ftjob-x:0",
    }
    assert ledger.reports.imbalance() == []
    after = stored.read_bytes()
    assert len(after) == len(before)
    assert b'secret 1"' not in after
    row = ledger.files.find(NAME)
    assert row is not None
    assert (row.bytes, row.sha256) == (len(after), hashlib.sha256(after).hexdigest())
    assert [line.number for line in read_lines(stored, "reinforcement")] == [*range(2, 13)]
    again = json.loads("".join(told(*command)))
    assert (again["exchanges"], again["versions"]) == (0, [])


def _names() -> Any:
    from sqlalchemy import select

    from tuneloop.shared.ledger.storage.schema import exchanges

    return select(exchanges.c.msg_id)


def test_what_comes_later_of_an_erased_line_is_not_taken(file: Path, ledger: Ledger, stored: Path) -> None:
    asked = exchange(task_id=f"{NAME}:1:ftjob-y:0", run_id="0")
    ledger.recording.record([asked])
    told("erase", "-c", file, "--file", NAME, "--line", "1")
    ledger.recording.record([asked, feedback(msg_id=asked.msg_id)])
    assert ledger.transactions.read(_names()) == []


def test_a_deleted_file_whose_bytes_are_gone_is_erased_all_the_same(
    file: Path,
    ledger: Ledger,
    stored: Path,
) -> None:
    rows_of_lines(ledger)
    ledger.files.delete(NAME)
    stored.unlink()
    assert "  exchanges    3" in told("erase", "-c", file, "--file", NAME, "--line", "1")


def test_the_last_line_needs_no_end(file: Path, ledger: Ledger, stored: Path) -> None:
    stored.write_bytes(stored.read_bytes().rstrip(b"\n"))
    size = stored.stat().st_size
    told("erase", "-c", file, "--file", NAME, "--line", "12")
    assert stored.stat().st_size == size
    assert [line.number for line in read_lines(stored, "reinforcement")] == [*range(1, 12)]


def test_what_is_not_there_is_refused(file: Path, ledger: Ledger, stored: Path) -> None:
    for arguments in (["--file", NAME], ["--line", "1"], [], ["--user", "a", "--file", NAME, "--line", "1"]):
        assert ran("erase", "-c", file, *arguments).exit_code == 2
    for arguments in (["--file", "file-none", "--line", "1"], ["--file", NAME, "--line", "13"]):
        with pytest.raises(EnvironmentRefused, match=r"there is no file file-none|has no line 13"):
            ran("erase", "-c", file, *arguments)
    assert len(stored.read_text().splitlines()) == 12
