"""SIGKILL of apps while they say something, over a network that loses answers: nothing is lost, nothing is said twice.

Of one reply, one source says one number after the other. A number that is sent again after a later one would be stored
a second time, if the service did not know it by its key.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.explorer.running import RunningExplorer

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[3]

#: Of one reply, a source's latest 250 events are kept: among so many replies, an app's are fewer.
REPLIES = 60


@contextmanager
def losing_answers(url: str, draw: random.Random) -> Iterator[str]:
    """A way to the service that now and then breaks when a request has arrived, before its answer is through."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pump(source: socket.socket, sink: socket.socket, *, loses: bool) -> None:
            with suppress(OSError), source, sink:
                while piece := source.recv(1 << 16):
                    if loses and draw.random() < 0.2:
                        break
                    sink.sendall(piece)
                sink.shutdown(socket.SHUT_RDWR)
                source.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    service = socket.create_connection((host, int(port)))
                    for source, sink, loses in ((client, service, False), (service, client, True)):
                        threading.Thread(target=pump, args=(source, sink), kwargs={"loses": loses}, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def app(url: str, outbox: Path, first: int | str, ids: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.runner.feedback.app", url, str(outbox), str(first), *ids]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ})


def killed_after(running: subprocess.Popen[str], seconds: float) -> list[int]:
    """Kill an app some time after its first acknowledgement; return the numbers that were acknowledged."""
    assert running.stdout
    first = running.stdout.readline()
    time.sleep(seconds)
    running.send_signal(signal.SIGKILL)
    rest, _ = running.communicate()
    return [int(line) for line in (first + rest).splitlines(keepends=True) if line.endswith("\n")]


def kills(explorer: RunningExplorer, outbox: Path, times: int, draw: random.Random) -> tuple[list[int], list[str]]:
    """Start and kill apps, two at once, which share an outbox; return what was acknowledged, and the ids."""
    ids = [explorer.chat().json()["id"] for _ in range(REPLIES)]
    acknowledged: list[int] = []
    with losing_answers(explorer.url, draw) as url:
        for kill in range(times):
            pair = [app(url, outbox, (2 * kill + each) * 10_000, ids) for each in range(2)]
            for running in pair:
                acknowledged += killed_after(running, draw.random() * 0.4)
        last = app(url, outbox, "-", ids)
        assert last.wait(120) == 0
        last.communicate()
    return acknowledged, ids


def check(explorer: RunningExplorer, outbox: Path, times: int) -> int:
    acknowledged, ids = kills(explorer, outbox, times, random.Random(0))
    stored = [int(value) for (value,) in explorer.rows("SELECT value FROM feedback ORDER BY id")]
    assert len(stored) == len(set(stored)), "said twice"
    assert set(acknowledged) <= set(stored), "lost"
    # Of each app, what was written and not yet acknowledged when it was killed may be there too: one thing.
    assert len(stored) - len(acknowledged) <= 2 * times
    by_app = [[value for value in stored if value // 10_000 == each] for each in range(2 * times)]
    assert all(each == sorted(each) for each in by_app), "out of order"
    assert [each for each in outbox.rglob("*") if each.is_file()] == []
    assert len(ids) == REPLIES
    return len(acknowledged)


def test_apps_may_be_killed_at_any_moment(explorer: RunningExplorer, tmp_path: Path) -> None:
    assert check(explorer, tmp_path / "outbox", times=6) > 50


@pytest.mark.soak
def test_apps_may_be_killed_at_any_moment_a_hundred_times(explorer: RunningExplorer, tmp_path: Path) -> None:
    assert check(explorer, tmp_path / "outbox", times=50) > 500


def test_a_forked_child_makes_no_tls_context(explorer: RunningExplorer, tmp_path: Path) -> None:
    """Another thread of its parent's may have held OpenSSL's locks when it was forked."""
    code = """
import os, ssl, sys
from tuneloop.runner import Feedback
feedback = Feedback(sys.argv[1], outbox=sys.argv[2])
def refuse(*_, **__):
    raise RuntimeError("a TLS context is made")
ssl.create_default_context = ssl.SSLContext.__new__ = refuse
pid = os.fork()
if not pid:
    feedback.reward(sys.argv[3], 1)
    os._exit(0 if feedback.flush(30) else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    command = [sys.executable, "-c", code, explorer.url, str(tmp_path / "outbox"), explorer.chat().json()["id"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_says_what_it_says_itself(explorer: RunningExplorer, tmp_path: Path) -> None:
    """As in a server that loads the app before it forks its workers."""
    said = explorer.chat().json()["id"]
    code = """
import os, sys
from tuneloop.runner import Feedback
url, folder, said = sys.argv[1:]
feedback = Feedback(url, outbox=folder)
feedback.reward(said, 1)
children = []
for number in (2, 3):
    pid = os.fork()
    if not pid:
        feedback.reward(said, number)
        os._exit(0 if feedback.flush(30) else 1)
    children.append(pid)
feedback.reward(said, 4)
assert feedback.flush(30)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
"""
    command = [sys.executable, "-c", code, explorer.url, str(tmp_path / "outbox"), said]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(int(value) for (value,) in explorer.rows("SELECT value FROM feedback")) == [1, 2, 3, 4]


def test_a_child_forked_while_the_parent_opens_its_first_connection_says_what_it_says(
    explorer: RunningExplorer, tmp_path: Path
) -> None:
    said = explorer.chat().json()["id"]
    code = """
import os, sys, threading
from tuneloop.runner import Feedback
importing = threading.Event()
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "httpcore._models":
            importing.set()
            threading.Event().wait(0.5)
sys.meta_path.insert(0, Slow())
url, folder, said = sys.argv[1:]
feedback = Feedback(url, outbox=folder)
feedback.reward(said, 1)
assert importing.wait(30)
pid = os.fork()
if not pid:
    feedback.reward(said, 2)
    os._exit(0 if feedback.flush(30) else 1)
assert feedback.flush(30)
assert os.waitpid(pid, 0)[1] == 0
"""
    command = [sys.executable, "-c", code, explorer.url, str(tmp_path / "outbox"), said]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(int(value) for (value,) in explorer.rows("SELECT value FROM feedback")) == [1, 2]


def test_an_app_that_just_ends_sends_what_it_said(explorer: RunningExplorer, tmp_path: Path) -> None:
    said = explorer.chat().json()["id"]
    code = "import sys, tuneloop.runner as to; to.Feedback(sys.argv[1], outbox=sys.argv[2]).reward(sys.argv[3], 1)"
    command = [sys.executable, "-c", code, explorer.url, str(tmp_path / "outbox"), said]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert explorer.rows("SELECT value FROM feedback") == [(1.0,)]
