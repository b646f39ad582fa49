import pytest

from tests.cli.operations.conftest import Run
from tests.factories import exchange, experience, feedback
from tuneloop.shared import quarantine
from tuneloop.shared.errors import TuneloopError
from tuneloop.shared.experience import Exchange, State, encode
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings


@pytest.fixture
def said(settings: Settings) -> list[Exchange]:
    """An exchange and its feedback in one slot, and in another one that the database refuses, and no record at all."""
    slots = [settings.spool_dir / name for name in ("0", "1")]
    said = [exchange(), exchange(experiences=(experience(logprobs=b"\0\0"),))]
    for slot in slots:
        slot.mkdir(parents=True)
    for payload in (encode(said[0]), encode(feedback(msg_id=said[0].msg_id))):
        quarantine.set_aside(slots[0], payload)
    for payload in (b"nonsense", encode(said[1])):
        quarantine.set_aside(slots[1], payload)
    return said


def names(run: Run) -> list[str]:
    return [line.split()[0] for line in run("spool", "list").stdout.splitlines()]


def test_what_is_in_quarantine_is_listed_without_its_text(run: Run, said: list[Exchange]) -> None:
    lines = run("spool", "list").stdout.splitlines()
    assert [line.split()[2] for line in lines] == ["0", "0", "1", "1"]
    assert [said[0].msg_id in line for line in lines] == [True, True, False, False]
    assert "exchange" in lines[0]
    assert "feedback" in lines[1]
    assert "not a record" in lines[2]


def test_what_the_database_takes_leaves_the_quarantine(run: Run, said: list[Exchange], ledger: Ledger) -> None:
    assert said
    done = run("spool", "retry")
    assert done.exit_code == 1
    assert done.stdout.startswith("2 records are in the database now, 2 are still refused")
    assert "bytes of ids" in done.stderr
    assert ledger.reports.counts()[State.REWARDED] == 1
    assert len(names(run)) == 2


def test_only_those_named_are_retried(run: Run, said: list[Exchange], ledger: Ledger) -> None:
    assert said
    first, second, *_ = names(run)
    assert run("spool", "retry", second).exit_code == 0
    assert names(run)[0] == first
    assert ledger.reports.counts()[State.RECORDED] == 0
    with pytest.raises(TuneloopError, match=r"not in quarantine below .*: abc"):
        run("spool", "retry", "abc")
    assert run("spool", "retry", first).exit_code == 0
    assert ledger.reports.counts()[State.REWARDED] == 1


def test_an_empty_quarantine_says_so(run: Run, ledger: Ledger) -> None:
    assert ledger
    assert run("spool", "list").stdout == "nothing is in quarantine\n"
    assert run("spool", "retry").stdout.startswith("0 records")
