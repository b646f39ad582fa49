"""Mixed traffic for half an hour, beside reloads and kills: nothing is lost or mixed up, and nothing grows."""

import itertools
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.doubles.engine import CHAT
from tests.explorer.checkpoints import register
from tests.explorer.running import eventually
from tests.explorer.test_main import job
from tests.hostile.bed import Bed, asking, bed_with, fresh_name
from tests.hostile.echo import echo_process, reply_to
from tests.hostile.shapes import ATTACK, HIDDEN, shapes
from tests.loop.harness.services import free_port
from tuneloop.shared.experience import Scope, VersionState
from tuneloop.shared.ledger.keys import KeyGrant

SECONDS = float(os.environ.get("TUNELOOP_TEST_SECONDS", "1800"))

_CLIENTS = 3
_SAMPLE_S = 2.0

#: What may still grow from the second third of the time to the last one: bytes, descriptors, and the 99th percentile.
_MORE_BYTES, _MORE_DESCRIPTORS, _MORE_LATENCY, _MORE_LATENCY_S = 48 << 20, 24, 3.0, 0.5

#: A client may get these while a worker or the engine has been killed.
_EXCUSED = {502, 503, 504}


@dataclass
class Usage:
    """A process's memory in bytes, and its descriptors, sample by sample."""

    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def look(self, pid: int) -> None:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        self.memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.descriptors.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))


def thirds(values: list[float]) -> tuple[list[float], list[float]]:
    """The second and the last third."""
    third = len(values) // 3
    return values[third : 2 * third], values[2 * third :]


def count_until(over: Callable[[], bool]) -> Iterator[int]:
    """0, 1, 2, … as long as it is not over."""
    for number in itertools.count():
        if over():
            return
        yield number


class Soak:
    """What happens to the bed meanwhile, until `over`."""

    def __init__(self, bed: Bed, restart_engine: Callable[[], None]) -> None:
        self.bed = bed
        self._keys = itertools.cycle([_key(bed, f"client-{number}") for number in range(_CLIENTS)])
        self.over = threading.Event()
        self.latencies: list[float] = []
        self.failures: list[BaseException] = []
        self.excused = self.kills = self.versions = 0
        self._restart_engine = restart_engine
        self._chance = random.Random(0)
        self._calm = threading.Event()
        self._calm.set()

    def chat(self) -> None:
        """One client, with a key of its own: it asks, judges and commits."""
        with ExitStack() as stack:
            headers = {"Authorization": f"Bearer {next(self._keys)}"}
            client = stack.enter_context(httpx.Client(base_url=self.bed.url, timeout=60, headers=headers))
            while not self.over.is_set():
                calm = self._calm.is_set()
                try:
                    self._ask(client)
                except httpx.TransportError:
                    self._excuse(calm)  # its worker was killed
                    client = stack.enter_context(httpx.Client(base_url=self.bed.url, timeout=60, headers=headers))

    def _excuse(self, calm: bool) -> None:
        """Count what went wrong for a client, for whom all was calm before; it must not be calm now."""
        assert not (calm and self._calm.is_set())
        self.excused += 1

    def _ask(self, client: httpx.Client) -> None:
        name, began, calm = fresh_name(), time.monotonic(), self._calm.is_set()
        answer = client.post(CHAT, json=asking(name))
        if answer.status_code in _EXCUSED:
            self._excuse(calm)
            time.sleep(0.1)
            return
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == reply_to(name)
        if calm and self._calm.is_set():
            self.latencies.append(time.monotonic() - began)
        msg_id = answer.json()["id"]
        self.bed.acknowledged.append(msg_id)
        with client.stream("POST", CHAT, json=asking(fresh_name(), stream=True)) as stream:
            next(stream.iter_lines(), None)  # and leave
        judged = client.post("/feedback", json={"msg_ids": [msg_id], "reward": 1})
        assert judged.status_code in {200, *_EXCUSED}, judged.text
        if len(self.bed.acknowledged) % 50 == 0:
            assert client.post("/commit").status_code in {200, *_EXCUSED}

    def attack(self) -> None:
        """Strangers send shapes, some of which stay open; every other one has a key."""
        lines = (b"\r\n", b"\r\nAuthorization: Bearer %b\r\n" % _key(self.bed, "stranger").encode())
        kinds, address = shapes(), (self.bed.http.base_url.host, self.bed.http.base_url.port)
        open_ones: list[socket.socket] = []
        for number in count_until(self.over.is_set):
            shape = self._chance.choice(kinds)
            with suppress(OSError):
                connection = socket.create_connection(address, timeout=5)
                open_ones.append(connection)
                names = (fresh_name().encode(), fresh_name().encode())
                data = shape.data.replace(ATTACK, names[0]).replace(HIDDEN, names[1])
                connection.sendall(data.replace(b"\r\n", lines[number % 2], 1))
            if len(open_ones) > 50:
                open_ones.pop(0).close()
            self.over.wait(0.05)
        for each in open_ones:
            each.close()

    def disturb(self) -> None:
        """Every few seconds a worker is killed, or the engine, or there is a new version."""
        survivor, ledger = min(self.bed.workers()), self.bed.ledger()
        for number in count_until(lambda: self.over.wait(8.0)):
            self._calm.clear()
            if number % 3 == 0:
                [os.kill(pid, signal.SIGKILL) for pid in self.bed.workers() if pid != survivor]
                eventually(lambda: len(self.bed.workers()) == 2)
                self.kills += 1
            elif number % 3 == 1:
                self._restart_engine()
                self.kills += 1
            else:
                version = register(ledger, job(self.bed.folder))
                eventually(lambda version=version: ledger.versions.get(version).state is not VersionState.CANDIDATE)
                self.versions += 1
            eventually(lambda: self.bed.http.get("/health/ready").status_code == 200)
            self.over.wait(2.0)
            self._calm.set()
        ledger.close()

    def guarded(self, work: Callable[[], None]) -> Callable[[], None]:
        """What ends all of it if it fails."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the test raises it
                self.failures.append(error)
                self.over.set()

        return run


def _key(bed: Bed, name: str, *scopes: Scope) -> str:
    """A key, by default for inference, feedback and commits, that each worker knows."""
    ledger = bed.ledger()
    grant = KeyGrant(name=name, scopes=scopes or (Scope.INFERENCE, Scope.FEEDBACK, Scope.COMMIT))
    key = ledger.keys.create(grant, actor="test")[1]
    ledger.close()
    headers = {"Authorization": f"Bearer {key}"}
    eventually(lambda: all(httpx.get(f"{bed.url}/v1/models", headers=headers).status_code == 200 for _ in range(20)))
    return key


@contextmanager
def restartable_engine(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """An engine's URL, and what kills it and starts another there."""
    port = free_port()
    with ExitStack() as stack:
        engine = stack.enter_context(ExitStack())
        url = engine.enter_context(echo_process(folder, port))

        def restart() -> None:
            engine.close()
            engine.enter_context(echo_process(folder, port))

        yield url, restart


@pytest.mark.soak
def test_nothing_grows_while_versions_change_and_processes_are_killed(tmp_path: Path) -> None:
    with restartable_engine(tmp_path) as (url, restart), bed_with(tmp_path, [url], workers=2, head_timeout=5) as bed:
        bed.http.headers["Authorization"] = f"Bearer {_key(bed, 'operator', *Scope)}"
        soak, control, worker = Soak(bed, restart), Usage(), Usage()
        eventually(lambda: httpx.get(f"{bed.url}/v1/models").status_code == 401)
        work = [soak.chat] * _CLIENTS + [soak.attack, soak.disturb]
        threads = [threading.Thread(target=soak.guarded(each)) for each in work]
        survivor, deadline = min(bed.workers()), time.monotonic() + SECONDS
        for each in threads:
            each.start()
        while time.monotonic() < deadline and not soak.over.wait(_SAMPLE_S):
            control.look(bed.process.pid)
            worker.look(survivor)
        soak.over.set()
        for each in threads:
            each.join()
        if soak.failures:
            raise soak.failures[0]
        report(soak, {"control process": control, "worker": worker})
        assert soak.kills
        assert soak.versions
        for usage in (control, worker):
            is_flat(usage.memory, more=_MORE_BYTES)
            is_flat(usage.descriptors, more=_MORE_DESCRIPTORS)
        before, after = (statistics.quantiles(each, n=100)[-1] for each in thirds(soak.latencies))
        assert after <= _MORE_LATENCY * before + _MORE_LATENCY_S
        bed.is_sound()


def is_flat(values: list[int], *, more: int) -> None:
    before, after = thirds([float(each) for each in values])
    assert statistics.median(after) - statistics.median(before) <= more, values


def report(soak: Soak, usages: dict[str, Usage]) -> None:
    """Print the medians of the second and the last third."""
    for name, usage in usages.items():
        memory = [f"{statistics.median(each) / (1 << 20):.0f} MiB" for each in thirds([float(m) for m in usage.memory])]
        files = [f"{statistics.median(each):.0f}" for each in thirds([float(each) for each in usage.descriptors])]
        print(f"{name}: {' -> '.join(memory)}, descriptors {' -> '.join(files)}")  # noqa: T201
    slowest = [f"{1000 * statistics.quantiles(each, n=100)[-1]:.0f} ms" for each in thirds(soak.latencies)]
    what = f"{len(soak.bed.acknowledged)} replies, {soak.kills} kills, {soak.versions} versions, {soak.excused} excused"
    print(f"{what}; 99th percentile {' -> '.join(slowest)}")  # noqa: T201
