"""What of a log cannot be read is left out and counted by kind, and does not cost the rest."""

import json
from pathlib import Path

from tests.runner.logs.writing import ANSWER, USER
from tuneloop.runner.logs.exchange import BrokenEntries
from tuneloop.runner.logs.request_logs import read_openai_jsonl

GOOD = json.dumps({"messages": [USER, ANSWER]}).encode()


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
