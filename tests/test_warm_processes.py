"""What is forked in place of a Python that is started is a process like it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.warm.process import WarmProcess

PIPE = subprocess.PIPE


def ended(*command: str, **but: object) -> tuple[int, str, str]:
    with WarmProcess([sys.executable, *command], stdout=PIPE, stderr=PIPE, text=True, **but) as process:
        output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def test_it_has_its_arguments_its_folder_its_variables_and_its_name(tmp_path: Path) -> None:
    code = (
        "import os, sys; print(sys.argv, os.getcwd(), os.environ['A'], 'HOME' in os.environ, __name__);"
        "print('fastapi' in sys.modules);"
        "print(open('/proc/self/cmdline').read().rstrip('\\0').split('\\0')[-2:])"
    )
    variables = {name: value for name, value in os.environ.items() if name != "HOME"} | {"A": "b"}
    assert ended("-P", "-c", code, "x", "y", cwd=tmp_path, env=variables) == (
        0,
        f"['-c', 'x', 'y'] {tmp_path} b False __main__\nTrue\n['x', 'y']\n",
        "",
    )


def test_a_module_of_the_folder_that_it_is_started_in_is_run(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("import sys; sys.stderr.write(sys.argv[1]); sys.exit(7)")
    assert ended("-m", "here", "z", cwd=tmp_path) == (7, "", "z")
    code, _, errors = ended("-P", "-m", "here", cwd=tmp_path)
    assert code == 1
    assert "No module named here" in errors


def test_what_nothing_catches_is_shown_and_ends_it_with_1() -> None:
    code, _, errors = ended("-c", "1/0")
    assert (code, errors.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_and_is_told(number: signal.Signals) -> None:
    with WarmProcess([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=PIPE) as process:
        assert process.stdout.readline() == b"\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == -number
        process.send_signal(number)  # to nobody


def test_a_variable_that_is_read_at_the_start_is_obeyed() -> None:
    code = "import sys; print(sys.flags.hash_randomization, sys.flags.utf8_mode)"
    assert ended("-c", code, env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}) == (0, "0 1\n", "")


def test_a_python_that_is_customized_is_started(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.here = True")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert ended("-c", "import sys; print(sys.here)", env=variables) == (0, "True\n", "")


_STARTING = """
import asyncio, os, resource, subprocess, sys

resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os.umask(0o027)
command = [sys.executable, "-P", "-m", "tuneloop.explorer.versions.verifier", "nowhere", "", "1", "nowhere"]
process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
fields = open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()
status = open(f"/proc/{process.pid}/status").read()
print([int(fields[1]) == os.getpid(), int(fields[3]) == process.pid, "Umask:\\t0027" in status])
print([process.communicate()[0], process.returncode])

async def verify():
    verifier = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    print([(await verifier.communicate())[0], verifier.returncode])

asyncio.run(verify())
print(subprocess.Popen._execute_child.__module__, file=sys.stderr)
"""


def test_what_a_forked_process_starts_is_its_child_and_as_one_that_was_not_forked() -> None:
    forked = ended("-c", _STARTING, starts=True)
    started = subprocess.run([sys.executable, "-c", _STARTING], capture_output=True, text=True, check=True)
    assert forked == (0, started.stdout, "tests.doubles.warm.template\n")
    assert (started.stdout.splitlines()[0], started.stderr) == ("[True, True, True]", "subprocess\n")


def test_what_cannot_be_forked_is_refused() -> None:
    with pytest.raises(ValueError, match="preexec_fn"):
        WarmProcess([sys.executable, "-c", ""], preexec_fn=print)
    with pytest.raises(ValueError, match="/bin/true"):
        WarmProcess(["/bin/true"])
