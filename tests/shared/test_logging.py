import logging
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from tuneloop.shared.logging import LINES_AT_ONCE, LINES_PER_S, LineLimiter

_SCRIPT = """
import sys
import structlog
from tuneloop.shared.logging import configure_logging

configure_logging()
structlog.get_logger().error("spool_write_failed", folder="/spool")
sys.stdout.write("went on")
"""


def test_one_line_per_event_goes_to_stderr() -> None:
    said = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    assert said.stdout == "went on"
    [line] = said.stderr.splitlines()
    assert "spool_write_failed" in line
    assert "folder=/spool" in line


def test_a_log_on_a_full_disk_stops_nobody() -> None:
    with Path("/dev/full").open("w") as full:
        said = subprocess.run(
            [sys.executable, "-c", _SCRIPT], stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
    assert said.stdout == "went on"


_FLOOD = """
import logging
import sys
import time
import structlog
from tuneloop.shared import logging as ours

ours._SUMMARY_S = 0.2
ours.configure_logging()
for number in range(5000):
    structlog.get_logger().error("request_failed", number=number)
    logging.getLogger("library").warning("number %d", number)
structlog.get_logger().error("another_event")
time.sleep(0.5)
"""


def test_an_event_that_comes_too_often_is_counted_and_the_others_are_written() -> None:
    said = subprocess.run([sys.executable, "-c", _FLOOD], capture_output=True, text=True, check=True).stderr
    assert LINES_AT_ONCE <= said.count("request_failed  ") < 1000
    assert LINES_AT_ONCE <= said.count(" library number") < 1000
    assert "another_event" in said
    summaries = [line for line in said.splitlines() if "lines_left_out" in line]
    assert any("request_failed=" in each for each in summaries)
    assert any("library:" in each for each in summaries)


def test_lines_come_back_with_time_and_are_told_once() -> None:
    told: list[dict[str, int]] = []
    now = [0.0]
    limiter = LineLimiter(told.append, clock=lambda: now[0])
    assert sum(limiter.admits("one") for _ in range(LINES_AT_ONCE + 7)) == LINES_AT_ONCE
    assert limiter.admits("another")
    limiter.summarise()
    limiter.summarise()
    assert told == [{"one": 7}]
    now[0] = 1.0
    assert sum(limiter.admits("one") for _ in range(100)) == LINES_PER_S
    now[0] = 1e6
    assert sum(limiter.admits("one") for _ in range(2 * LINES_AT_ONCE)) == LINES_AT_ONCE


def test_both_kinds_of_lines_are_limited_and_the_summary_is_not() -> None:
    limiter = LineLimiter(lambda lines: None)
    record = logging.LogRecord("a", logging.WARNING, "a.py", 1, "x", (), None)
    assert sum(limiter.filter(record) for _ in range(2 * LINES_AT_ONCE)) == LINES_AT_ONCE
    for _ in range(2 * LINES_AT_ONCE):
        assert limiter.process(None, "", {"event": "lines_left_out"})
    for _ in range(LINES_AT_ONCE):
        limiter.process(None, "", {"event": "x"})
    with pytest.raises(structlog.DropEvent):
        limiter.process(None, "", {"event": "x"})
