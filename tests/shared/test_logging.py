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
