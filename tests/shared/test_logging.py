import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.full_pipe import full_pipe
from tuneloop.shared.logging import LINES_AT_ONCE, MOST_WAITING

_SCRIPT = """
import sys
import structlog
from tuneloop.shared.logging import configure_logging

configure_logging()
structlog.get_logger().error("outbox_write_failed", folder="/outbox")
sys.stdout.write("went on")
"""


def test_one_line_per_event_goes_to_stderr() -> None:
    said = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    assert said.stdout == "went on"
    [line] = said.stderr.splitlines()
    assert "outbox_write_failed" in line
    assert "folder=/outbox" in line


_ESCAPES = r"""
import structlog
from tuneloop.shared.logging import configure_logging

configure_logging()
structlog.get_logger().warning("rater_quarantined", rater="\x1b[2Jok\n2026 [info] paid", many=["\x1b"])
try:
    raise ValueError("a")
except ValueError:
    structlog.get_logger().exception("failed")
"""


def test_names_that_clients_choose_move_no_cursor_and_begin_no_line() -> None:
    said = subprocess.run([sys.executable, "-c", _ESCAPES], capture_output=True, text=True, check=True).stderr
    assert "\x1b" not in said
    first, *rest = said.splitlines()
    assert r"\x1b[2Jok" in first
    assert "paid" in first
    assert rest[-1] == "ValueError: a"


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


_LEVELS = """
import logging
import structlog
from tuneloop.shared.logging import configure_logging

configure_logging()
log = structlog.get_logger()
log.debug("seen_by_few")
log.info("engine_ready", engine=0)
log.error("outbox_write_failed", path=Exception("odd"))
logging.getLogger("lib").warning("careful")
logging.getLogger("lib").error("worse")
"""


def logged(**environment: str) -> list[str]:
    said = subprocess.run(
        [sys.executable, "-c", _LEVELS], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return said.stderr.splitlines()


def test_the_environment_names_the_least_level() -> None:
    assert len(logged()) == 4
    assert len(logged(TUNELOOP_LOG_LEVEL="debug")) == 5
    assert len(logged(TUNELOOP_LOG_LEVEL="error")) == 2
    assert len(logged(TUNELOOP_LOG_LEVEL="loud")) == 4


def test_each_line_is_one_json_object_if_so_wanted() -> None:
    lines = [json.loads(line) for line in logged(TUNELOOP_LOG_JSON="1")]
    assert [line["event"] for line in lines] == ["engine_ready", "outbox_write_failed", "careful", "worse"]
    assert lines[0]["engine"] == 0
    assert {line["level"] for line in lines} == {"info", "error", "warning"}
    assert all(line["timestamp"].endswith("Z") for line in lines)


_QUOTING = """
import logging
import threading
import structlog
from tuneloop.shared.logging import clean_error, clean_errors, configure_logging

configure_logging()
clean_errors(lambda told: told.replace("ann@example.org", "[REDACTED:email]"))
log, library = structlog.get_logger(), logging.getLogger("library")


def fail():
    raise RuntimeError("this is not a number: " + "@".join(("ann", "example.org")))


try:
    fail()
except RuntimeError as error:
    log.exception("request_failed")
    log.error("worker_failed", reason=str(error), error=repr(error))
    library.exception("it is %s", error)
    assert clean_error(error) == "this is not a number: [REDACTED:email]"
thread = threading.Thread(target=fail)
thread.start()
thread.join()
fail()
"""


@pytest.mark.parametrize("as_json", ["0", "1"])
def test_what_errors_quote_is_cleaned_wherever_it_is_told(as_json: str) -> None:
    """A traceback, a reason, a library's line, the end of a thread and that of the process."""
    variables = {**os.environ, "TUNELOOP_LOG_JSON": as_json}
    told = subprocess.run([sys.executable, "-c", _QUOTING], capture_output=True, text=True, check=False, env=variables)
    assert told.returncode == 1
    assert "ann@example.org" not in told.stderr
    assert told.stderr.count("[REDACTED:email]") == 7
    assert told.stderr.count("RuntimeError: this is not a number") >= 4


_FLOODS_A_PIPE = """
import sys
import structlog
from tuneloop.shared.logging import LOG, MOST_WAITING, configure_logging

configure_logging()
dropped = []
LOG.count_dropped = lambda: dropped.append(1)
for number in range(3 * MOST_WAITING):
    structlog.get_logger().error(f"event_{number}")
sys.stdout.write(str(len(dropped)))
"""


def test_a_pipe_that_nobody_reads_stops_nobody_and_what_is_dropped_is_counted() -> None:
    with full_pipe() as log:
        said = subprocess.run([sys.executable, "-c", _FLOODS_A_PIPE], stdout=subprocess.PIPE, stderr=log, timeout=60)
    assert said.returncode == 0
    assert int(said.stdout) in {2 * MOST_WAITING, 2 * MOST_WAITING - 1}  # one is being written
