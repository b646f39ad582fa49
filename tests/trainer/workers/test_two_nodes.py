"""Two workers on two nodes of a Ray cluster: a worker dies, a node, the head; no row is lost, nor trained twice.

The nodes are network namespaces of this machine, each with an address, and a folder of Ray's, of its own.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.trainer.factories import commit, sample
from tuneloop.shared.errors import LedgerError
from tuneloop.shared.experience import State

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("ray")]

ADDRESSES = {1: "10.77.0.1", 2: "10.77.0.2"}
HEAD = f"{ADDRESSES[1]}:6379"
ENVIRONMENT = os.environ | {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "t" * 32,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


class Nodes:
    """The machines of a cluster. `temporary` is a folder that each of them has for itself."""

    def __init__(self, folder, temporary):
        self._folder, self._temporary = folder, temporary
        self._names = {number: f"tuneloop-{os.getpid()}-{number}" for number in ADDRESSES}
        self._processes = {}

    def connect(self):
        for name in self._names.values():
            self._ip("netns", "add", name)
        self._ip(
            "link", "add", "eth0", "netns", self._names[1], "type", "veth", "peer", "eth0", "netns", self._names[2]
        )
        for number, name in self._names.items():
            self._ip("-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                self._ip("-n", name, "link", "set", interface, "up")
            self._ip("-n", name, "route", "add", "default", "dev", "eth0")

    def start(self, number):
        """Start Ray with room for one worker."""
        joins = ["--head", "--port=6379", f"--temp-dir={self._temporary}", "--include-dashboard=false"]
        log = self._folder / f"node-{number}.log"
        with log.open("wb") as output:
            self._processes[number] = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._names[number], "unshare", "--mount"),
                    *("sh", "-c", f'mount -t tmpfs none {self._temporary} && exec "$@"', "sh"),
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                    *(joins if number == 1 else [f"--address={HEAD}"]),
                    *(f"--node-ip-address={ADDRESSES[number]}", "--num-cpus=1", "--object-store-memory=80000000"),
                ],
                env=ENVIRONMENT,
                stdout=output,
                stderr=output,
            )
        _until(lambda: "Ray runtime started" in log.read_text(), self._processes[number], log)

    def run(self, command, log):
        """Start a command on node 1."""
        at = ("nsenter", f"--target={self._processes[1].pid}", "--net", "--mount", f"--wd={self._folder}")
        with log.open("ab") as output:
            return subprocess.Popen([*at, *command], env=ENVIRONMENT, stdout=output, stderr=output)

    def find(self, number, word=""):
        """The processes of a node whose command has the word."""
        pids = self._ip("netns", "pids", self._names[number]).split()
        return [pid for pid in map(int, pids) if word in _command_of(pid)]

    def kill(self, number, but=""):
        """End all processes of a node, but those whose command has a word."""
        spared = self.find(number, but) if but else []
        while left := set(self.find(number)) - set(spared):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self._processes.pop(number).wait()

    def close(self):
        for number in list(self._processes):
            self.kill(number)
        for name in self._names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def _ip(self, *arguments):
        return subprocess.run(["ip", *arguments], capture_output=True, check=True, text=True).stdout


def _command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _until(condition, process, log):
    deadline = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, log.read_text()[-5000:]
        assert time.monotonic() < deadline, log.read_text()[-5000:]
        time.sleep(0.2)


@pytest.fixture
def nodes(tmp_path):
    temporary = Path(f"/tmp/ray-{os.getpid()}-nodes")  # sockets' names must be short
    temporary.mkdir()
    made = Nodes(tmp_path, temporary)
    try:
        try:
            made.connect()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)}")
        yield made
    finally:
        made.close()
        shutil.rmtree(temporary)


def test_a_worker_a_node_and_the_head_die_and_every_row_is_trained_once(nodes, settings, ledger, tmp_path):
    log, config = tmp_path / "trainer.log", tmp_path / "trainer.yaml"
    chosen = settings(trainer={"workers": 2, "save_interval": 2}, cluster={"node_num": 2, "ray_address": HEAD})
    config.write_text(yaml.safe_dump(chosen.model_dump(mode="json", exclude_unset=True)))
    rows = iter(range(1000))

    def train(steps):
        commit(ledger, [sample(next(rows)) for _ in range(4 * steps)])

    def start():
        return nodes.run([sys.executable, "-m", "tuneloop.trainer", "--config", str(config)], log)

    def newest():
        with suppress(LedgerError):
            return ledger.versions.newest().version
        return 0

    for number in ADDRESSES:
        nodes.start(number)
    train(3)
    process = start()
    _until(lambda: re.search(r"step=3\b", log.read_text()), process, log)
    on_each = {number: nodes.find(number, "RayTrainWorker") for number in ADDRESSES}
    assert [len(pids) for pids in on_each.values()] == [1, 1]

    os.kill(on_each[2][0], signal.SIGSTOP)  # so that the other waits for it within a step
    train(3)
    time.sleep(2)
    os.kill(on_each[2][0], signal.SIGKILL)
    _until(lambda: newest() == 3, process, log)

    train(1)
    _until(lambda: re.search(r"step=7\b", log.read_text()), process, log)
    nodes.kill(2)
    _until(lambda: "workers_wait" in log.read_text(), process, log)
    nodes.start(2)
    train(1)
    _until(lambda: newest() == 4, process, log)

    train(1)
    _until(lambda: re.search(r"step=9\b", log.read_text()), process, log)
    nodes.kill(1, but="tuneloop.trainer")
    assert process.wait(600) == 3
    said = [line for line in log.read_text().splitlines() if line.startswith("trainer: ")]
    assert len(said) == 1
    assert f"cluster.ray_address: {HEAD}: no Ray cluster to join: start Ray" in said[0]
    nodes.kill(2)
    for number in ADDRESSES:
        nodes.start(number)
    train(1)
    process = start()
    _until(lambda: newest() == 5, process, log)

    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert "PlacementGroupCleaner" not in log.read_text()
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 40}
    assert [each.consumed for each in ledger.versions.all()] == [0, 8, 8, 8, 8, 8]
    assert ledger.reports.imbalance() == []
