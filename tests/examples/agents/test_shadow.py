"""Shadow runs of an app's calls: against a teacher behind an endpoint that takes feedback."""

import re

import pytest
from oracle import Oracle, serving

from examples.email_search.world import Mailbox, questions
from examples.shadow.main import main


def test_what_is_run_again_is_rewarded_for_answering_as_production_does(capsys: pytest.CaptureFixture[str]) -> None:
    every = [*questions(held_out=False), *questions(held_out=True)]
    oracle = Oracle(Mailbox(), every)
    with serving(oracle) as url:
        main(["--service", url, "--calls", "12", "--rate", "1.0"])
    said = capsys.readouterr().out
    assert "held out: 1.000 -> 1.000" in said
    assert re.search(r"'rewarded': 12\b", said)
    entries = [entry for path, body in oracle.asked if path == "/feedback" for entry in body["feedback"]]
    assert [entry["reward"] for entry in entries] == [1.0] * 12
    assert "/commit" in [path for path, _ in oracle.asked]
    measured = {run["task_id"] for run in oracle.runs if run.get("train") is False}
    assert not measured & {entry["task_id"] for entry in entries}
    assert len(measured) == 2 * len(questions(held_out=True))
