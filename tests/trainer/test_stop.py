"""Being told to stop, also a thousand times and at the worst moment."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

WAITING = """
import os, signal, sys, time
from tuneloop.trainer.stop import SignalStop

stop = SignalStop(signal.SIGTERM, signal.SIGINT)
assert not stop.is_set() and not stop.wait(0.01)
"""


TOLD_BY_A_THREAD = """
import threading
threading.Timer(0.2, stop.set).start()
assert stop.wait(60) and stop.is_set() and stop.wait(60)
for _ in range(10_000):
    stop.set()  # more than the pair of sockets holds
print(True)
"""

TOLD = """
print("waiting", flush=True)
began = time.monotonic()
assert stop.wait(60) and stop.is_set() and stop.wait(60)
print(time.monotonic() - began < 30)
"""


def _waiting_then(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WAITING + code], stdout=subprocess.PIPE, text=True)


def test_a_signal_ends_the_wait() -> None:
    with _waiting_then(TOLD) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.terminate()
        assert process.communicate(timeout=30)[0] == "True\n"
    assert process.returncode == 0


def test_another_thread_ends_the_wait_too() -> None:
    with _waiting_then(TOLD_BY_A_THREAD) as process:
        try:
            assert process.communicate(timeout=30)[0] == "True\n"
        finally:
            process.kill()


def test_ctrl_c_is_answered_at_once_with_what_is_waited_for() -> None:
    code = (
        WAITING.replace("SIGINT)", "SIGINT, answer='waits for the step\\n')")
        + "print('waiting', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == "waits for the step\n"
            assert process.poll() is None
        finally:
            process.kill()


def test_the_trainer_alone_answers_ctrl_c(tmp_path: Path) -> None:
    fifo = tmp_path / "settings.yaml"
    os.mkfifo(fifo)  # to read it takes until somebody writes: so it is in the middle of something
    command = [sys.executable, "-m", "tuneloop.trainer", "--config", str(fifo)]
    with subprocess.Popen(command, stderr=PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            with fifo.open("w"):  # it has opened it, and waits
                process.send_signal(signal.SIGINT)
                said = process.stderr.readline()
        finally:
            process.kill()
    assert said == "trainer: stopping after the current step or publication\n"
