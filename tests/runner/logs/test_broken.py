"""What of a log cannot be read is left out and counted by kind, and does not cost the rest."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runner.logs.test_spans import CHAT, MESSAGES, NEW, studio
from tests.runner.logs.writing import ANSWER, USER, otlp, write_lines
from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.exchange import BrokenEntries, LoggedExchange
from tuneloop.runner.logs.request_logs import read_openai_jsonl
from tuneloop.runner.logs.span_logs import read_otlp, read_studio

GOOD = json.dumps({"messages": [USER, ANSWER]}).encode()
CALLED = {"id": "s1", "attributes": CHAT | MESSAGES}
Reader = Callable[[Path, BrokenEntries], Iterator[LoggedExchange]]


def test_broken_lines_are_counted_by_kind(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    bad = [b"{", b'{"messages": [' + b"[" * 100_000, b"5", b'{"a": "\xff"}', b'{"messages": [5]}', b"{}", b"]", b'""']
    log.write_bytes(b"\n".join([GOOD, *bad, GOOD]))
    broken = BrokenEntries()
    assert [each.messages for each in read_openai_jsonl(log, broken)] == [(USER,), (USER,)]
    assert broken.counts == {"not JSON": 3, "not an object": 2, "not UTF-8": 1, "no exchange": 2}
    assert broken.total == len(bad)
    report = list(broken.report())
    assert report[0].startswith(f"3 not JSON: {log}:2: not JSON: ")
    assert f"{log}:5: not UTF-8 at character 7" in "\n".join(report)


def test_what_windows_redirects_is_read(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(GOOD.decode().replace("parcel", "päckchen").encode("utf-16"))
    [exchange] = read_openai_jsonl(tmp_path / "log.jsonl")
    assert exchange.messages[0]["content"] == "Where is my päckchen?"


# Spans.


def test_broken_spans_cost_no_others(tmp_path: Path) -> None:
    batch = otlp(CALLED, *({**CALLED, "id": f"s{at}"} for at in range(2, 6)))
    spans = batch["resourceSpans"][0]["scopeSpans"][0]["spans"]
    del spans[1]["spanId"]
    spans[2]["attributes"] = [{"value": {"intValue": "1"}}]
    spans[3] = 5
    cut_off = otlp({**CALLED, "id": "s9", "attributes": CHAT | {"gen_ai.input.messages": '[{"role": "us'}})
    resource = {"resourceSpans": [{"resource": {"attributes": [5]}, "scopeSpans": [{"spans": [spans[0]]}]}]}
    records: dict[str, Any] = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"attributes": [5]}]}]}]}
    file = write_lines(tmp_path / "x.jsonl", [batch, cut_off, resource, records, {"spans": []}, batch])
    broken = BrokenEntries()
    assert [each.exchange_id for each in read_otlp(file, broken)] == ["s1", "s5", "s1", "s5"]
    assert broken.counts == {
        "broken span": 5,
        "no OTLP": 3,
        "broken resource": 1,
        "broken log record": 1,
    }
    assert f"{file}:2: span 1: gen_ai.input.messages is no JSON" in "\n".join(broken.report())


def test_broken_rows_of_studio_cost_no_others(tmp_path: Path) -> None:
    common = {"traceId": "t", "status": {"code": 1}, "events": []}
    rows = [
        {"id": "1", "spanId": "1", "startTimeUnixNano": "1", "attributes": '{"gen_ai', **common},
        {"id": "2", "spanId": "2", "startTimeUnixNano": "2", "attributes": CHAT | MESSAGES, **common},
        {"id": "3", "spanId": "3", "startTimeUnixNano": "3", "attributes": [5], **common},
    ]
    file = studio(tmp_path, NEW, *rows)
    broken = BrokenEntries()
    assert [each.exchange_id for each in read_studio(file, broken)] == ["2"]
    assert broken.counts == {"broken span": 2}
    assert f"{file}: span_table row 1: " in next(broken.report())
    with pytest.raises(LogRefused, match="row 1"):
        list(read_studio(file))


AGENT = {"gen_ai.operation.name": "invoke_agent", "tuneloop.train": False}


def of_otlp(folder: Path) -> Iterator[LoggedExchange]:
    spans = [CALLED, {"id": "s0", "attributes": AGENT}, {**CALLED, "id": "s2", "trace": "b" * 32}]
    return read_otlp(write_lines(folder / "x.jsonl", [otlp(*spans)]))


def of_studio(folder: Path) -> Iterator[LoggedExchange]:
    spans = [("a", CHAT | MESSAGES), ("a", AGENT), ("b", CHAT | MESSAGES)]
    rows = [
        {"id": str(at), "spanId": str(at), "traceId": trace, "attributes": attributes, "startTimeUnixNano": str(at)}
        for at, (trace, attributes) in enumerate(spans)
    ]
    return read_studio(studio(folder, NEW, *rows))


@pytest.mark.parametrize("read", [of_otlp, of_studio])
def test_an_opt_out_of_any_span_holds_for_its_trace(
    tmp_path: Path, read: Callable[[Path], Iterator[LoggedExchange]]
) -> None:
    assert [each.train for each in read(tmp_path)] == [False, True]
