"""Exchanges of a ledger: as it exports them, and as a service lists them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.data.exporting import ANSWER, ASKED, CALLS, TOOLS, about, asked
from tests.doubles.engine import MODEL
from tests.explorer.running import RunningExplorer
from tests.runner.logs.writing import write_lines
from tuneloop.cli.exports import ExportRequest, Format, export
from tuneloop.runner.errors import LogRefused, ServiceRefused
from tuneloop.runner.logs.exchange import LoggedExchange
from tuneloop.runner.logs.request_logs import read_export, read_stored_completions
from tuneloop.shared.experience import Kind
from tuneloop.shared.ledger.export import Selection
from tuneloop.shared.ledger.ledger import Ledger

SFT, DPO, KTO, EXPERIENCES = Format


def exported(ledger: Ledger, folder: Path, format_: Format = EXPERIENCES, **but: Any) -> list[LoggedExchange]:
    file = folder / "rows.jsonl"
    export(ledger, ExportRequest(format_, Selection("acme"), **but), file)
    return list(read_export(file))


def test_an_experience_is_an_exchange(ledger: Ledger, tmp_path: Path) -> None:
    said = asked(user="ann", task_id="t", run_id="r", request={"model": "m", "messages": ASKED, "tools": TOOLS})
    ledger.recording.record([said, about(said, value=0.5, source="judge")])
    [read] = exported(ledger, tmp_path)
    assert (list(read.messages), list(read.reply), list(read.tools)) == (ASKED, [ANSWER], TOOLS)
    assert (read.exchange_id, read.conversation, read.user) == (said.msg_id, "t/r", "ann")
    assert (read.reward, read.train, read.target, read.source) == (0.5, True, False, "tuneloop")


def test_its_tool_calls_are_in_it(ledger: Ledger, tmp_path: Path) -> None:
    said = asked("", request={"messages": ASKED, "tools": TOOLS}, tool_calls=json.dumps(CALLS).encode())
    ledger.recording.record([said])
    assert exported(ledger, tmp_path)[0].reply[0]["tool_calls"] == CALLS


def test_an_edited_answer_is_wanted(ledger: Ledger, tmp_path: Path) -> None:
    said = asked()
    ledger.recording.record([said, about(said, Kind.DEMONSTRATION, text="On Monday.", metric="demonstration")])
    [read] = exported(ledger, tmp_path)
    assert (read.reply[0]["content"], read.target) == ("On Monday.", True)


@pytest.mark.parametrize("reason", ["opt_out", "held_out"])
def test_what_must_not_be_trained_on_says_so(ledger: Ledger, tmp_path: Path, reason: str) -> None:
    ledger.recording.record([asked(drop_reason=reason)])
    assert [each.train for each in exported(ledger, tmp_path)] == [False]


def test_what_was_cut_off_has_no_reply(ledger: Ledger, tmp_path: Path) -> None:
    ledger.recording.record([asked(drop_reason="cut_off")])
    [read] = exported(ledger, tmp_path)
    assert (list(read.messages), read.reply, read.train) == (ASKED, (), True)


def test_the_other_formats_are_read_too(ledger: Ledger, tmp_path: Path) -> None:
    good, bad = asked(), asked("No idea.")
    said = [about(good, value=1.0), about(bad, value=0.0), about(good, Kind.BOOLEAN, value=1.0, source="ann")]
    ledger.recording.record([good, bad, *said, about(good, Kind.PREFERENCE, worse=bad, metric="preference")])
    for format_ in (SFT, DPO, KTO):
        read = exported(ledger, tmp_path, format_)[0]
        assert (list(read.messages), [each["content"] for each in read.reply]) == (ASKED, ["Hello."]), format_


@pytest.mark.parametrize("row", [{}, {"msg_id": "x"}, {"msg_id": "x", "messages": 5}, {"messages": []}])
def test_what_is_no_row_is_named(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(LogRefused, match=r"rows\.jsonl:1"):
        list(read_export(write_lines(tmp_path / "rows.jsonl", [row])))


def test_stored_completions_are_listed_from_a_running_service(explorer: RunningExplorer) -> None:
    of_run = {"task_id": "t", "run_id": "r"}
    ids = [explorer.chat(metadata=of_run, user="ann").json()["id"] for _ in range(3)]
    explorer.chat(metadata={"run_id": "other"})
    explorer.chat(metadata=of_run | {"train": "false"})
    explorer.until_flushed()
    read = list(read_stored_completions(explorer.url, metadata=of_run))
    assert [each.exchange_id for each in read[:3]] == ids
    assert [each.train for each in read] == [True, True, True, False]
    assert {(each.conversation, each.model, each.user) for each in read} == {
        ("t/r", MODEL, "ann"),
        ("t/r", MODEL, None),
    }
    assert read[0].messages == ({"role": "user", "content": "3+4="},)
    assert read[0].reply[0]["role"] == "assistant"
    assert len(list(read_stored_completions(explorer.url))) == 5


def test_pages_are_read_to_the_end(explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneloop.runner.logs.request_logs._PAGE", 2)
    ids = [explorer.chat().json()["id"] for _ in range(5)]
    explorer.until_flushed()
    assert [each.exchange_id for each in read_stored_completions(explorer.url)] == ids


def test_who_is_no_service_is_refused(explorer: RunningExplorer) -> None:
    for url in ("http://127.0.0.1:9", f"{explorer.url}/nowhere"):
        with pytest.raises(ServiceRefused):
            list(read_stored_completions(url))
