"""What the kernel tells of processes, by which a busy one is told from one that stands still."""

import subprocess
import sys

from tests.explorer.running import eventually
from tuneloop.shared.process_time import cpu_seconds

#: Computes in a process that it has started itself, and waits for it.
_BELOW = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])"


def test_the_time_of_a_process_is_that_of_all_below_it() -> None:
    with subprocess.Popen([sys.executable, "-c", _BELOW], process_group=0) as running:
        try:
            before = cpu_seconds(running.pid)
            eventually(lambda: cpu_seconds(running.pid) > before + 0.5)
        finally:
            subprocess.run(["kill", "-9", "--", f"-{running.pid}"], check=True)
    assert cpu_seconds(running.pid) == 0
