import json
import os
import subprocess
import sys
from pathlib import Path

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


_LEVELS = """
import logging
import structlog
from tuneloop.shared.logging import configure_logging

configure_logging()
log = structlog.get_logger()
log.debug("seen_by_few")
log.info("engine_ready", engine=0)
log.error("spool_write_failed", path=Exception("odd"))
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
    assert [line["event"] for line in lines] == ["engine_ready", "spool_write_failed", "careful", "worse"]
    assert lines[0]["engine"] == 0
    assert {line["level"] for line in lines} == {"info", "error", "warning"}
    assert all(line["timestamp"].endswith("Z") for line in lines)
