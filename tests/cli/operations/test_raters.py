"""`tuneloop raters`: who is listed, and decisions by hand."""

import json

import pytest

from tests.cli.operations.conftest import Run
from tests.factories import exchange, feedback
from tuneloop.shared.errors import UnknownRater
from tuneloop.shared.ledger.ledger import Ledger


def test_raters_are_listed_quarantined_and_released(run: Run, ledger: Ledger) -> None:
    assert run("raters").output == "there is no feedback yet\n"
    said = exchange(tenant="default")
    about = {"tenant": "default", "msg_id": said.msg_id}
    ledger.recording.record([said, feedback(**about, source="eve\x1b[2J", value=5.0), feedback(**about)])
    listed = run("raters").output
    assert "(no source) (default): active, 1 events\n" in listed
    assert "\x1b" not in listed
    done = run("raters", "quarantine", "eve\x1b[2J", "--reason", "a\nlie")
    assert (done.exit_code, done.output.count("is in quarantine")) == (0, 1)
    assert "quarantined, 1 events" in run("raters").output.splitlines()[0]
    run("raters", "release", "eve\x1b[2J", "--reason", "no lie")
    log = run("raters", "--log").output.splitlines()
    assert len(log) == 2
    assert log[0].endswith("lie")
    assert log[1].endswith("no lie")
    told = json.loads(run("raters", "--log", "--json").output)
    assert [each["reason"] for each in told] == ["a\nlie", "no lie"]
    assert {each["name"] for each in json.loads(run("raters", "--json").output)} >= {"eve\x1b[2J"}
    ended = json.loads(run("raters", "release", "eve\x1b[2J", "--reason", "no", "--json").output)
    assert ended["state"] == "released"


@pytest.mark.usefixtures("ledger")
def test_a_decision_wants_a_known_name_and_a_reason(run: Run) -> None:
    with pytest.raises(UnknownRater):
        run("raters", "release", "bob", "--reason", "who?")
    assert run("raters", "quarantine", "bob").exit_code == 2
