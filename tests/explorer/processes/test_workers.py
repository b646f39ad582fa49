"""Several workers under one control process, as their users start them."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tests.doubles.engine import CHAT, EngineDouble, engine_place
from tests.doubles.warm.process import WarmProcess
from tests.explorer.checkpoints import register
from tests.explorer.running import HELLO, eventually, settings_for
from tests.explorer.test_main import attached_to, job, service, write_settings
from tests.loop.harness.services import alive, command_of, descendants
from tests.outboxes import exchanges_in, records_by_file
from tuneloop.explorer.__main__ import listen
from tuneloop.explorer.channel import AnswerMessage, Channel
from tuneloop.explorer.processes import control
from tuneloop.explorer.processes.control import WorkerProcess, Workers
from tuneloop.runner.outbox import SUFFIX, owner_of
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import Exchange, State, VersionState
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.settings.settings import Settings

STREAM = HELLO | {"stream": True}

pytestmark = pytest.mark.xdist_group("workers")


@dataclass
class Staff:
    """A service of two workers."""

    folder: Path
    process: "subprocess.Popen[bytes]"
    http: httpx.Client
    double: EngineDouble

    @property
    def root(self) -> Path:
        return job(self.folder) / "outbox"

    def pids(self) -> list[int]:
        """The workers that live."""
        return [pid for pid in descendants(self.process.pid) if "tuneloop.explorer.processes.worker" in command_of(pid)]

    def owner_of(self, pid: int) -> str | None:
        """The owner whose file a worker appends to."""
        for held in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has just been closed
                if (path := held.readlink()).suffix == SUFFIX:
                    return owner_of(path.stem)
        return None

    def kept(self) -> dict[str, list[str]]:
        """The ids on disk by owner, as often as they are there."""
        found: dict[str, list[str]] = {}
        for file, records in records_by_file(self.root).items():
            found.setdefault(owner_of(file), []).extend(each.msg_id for each in records if isinstance(each, Exchange))
        return found

    def owner_of_reply(self, msg_id: str) -> str:
        (owner,) = [owner for owner, ids in self.kept().items() if msg_id in ids]
        return owner

    def wait_for_both(self) -> None:
        """Wait until both workers answer: each has written then."""
        eventually(lambda: len(self.pids()) == 2)
        with ExitStack() as stack:
            self.clients_of_both(stack)

    def clients_of_both(self, stack: ExitStack) -> dict[str, httpx.Client]:
        """A client with a kept connection to each worker, by its owner in the outbox."""
        found: dict[str, httpx.Client] = {}
        while len(found) < 2:
            client = stack.enter_context(httpx.Client(base_url=self.http.base_url, timeout=30))
            found[self.owner_of_reply(chat(client))] = client
        return found

    def metrics(self, client: httpx.Client) -> dict[str, float]:
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(client.get("/metrics").text):
            for sample in family.samples:
                found[sample.name] += sample.value
        return dict(found)

    def ledger(self) -> Ledger:
        return Ledger(connect(f"sqlite:///{job(self.folder)}/buffer/exp_buffer.db"))


def chat(client: httpx.Client, **but: object) -> str:
    reply = client.post(CHAT, json=HELLO | but)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


@contextmanager
def hired(folder: Path, double: EngineDouble, **explorer: object) -> Iterator[Staff]:
    """A service, its `explorer` with these settings, both of whose workers serve."""
    but = {f"explorer__{name}": value for name, value in explorer.items()} | attached_to(double)
    settings = write_settings(folder, explorer__workers=2, explorer__service_status_check_interval=0.1, **but)
    with service(settings) as (process, http):
        found = Staff(folder, process, http, double)
        found.wait_for_both()
        yield found


@pytest.fixture(scope="module")
def staff(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staff]:
    """On an engine of its own: it lives beside the services that other tests here start."""
    with engine_place() as place, hired(tmp_path_factory.mktemp("workers"), place.fresh()) as found:
        yield found


def test_both_answer_and_every_reply_is_recorded_once(staff: Staff) -> None:
    said = []
    for _ in range(40):
        with httpx.Client(base_url=staff.http.base_url, timeout=30) as client:
            said += [chat(client) for _ in range(5)]
    eventually(lambda: staff.http.post("/commit").status_code == 200)
    kept = staff.kept()
    assert all(len(set(said) & set(ids)) >= 20 for ids in kept.values()), {
        owner: len(ids) for owner, ids in kept.items()
    }
    assert Counter(each for ids in kept.values() for each in ids if each in set(said)) == Counter(said)
    ledger = staff.ledger()
    assert sum(ledger.reports.counts().values()) == sum(map(len, kept.values()))
    ledger.close()


def test_what_one_has_acknowledged_the_other_knows(staff: Staff) -> None:
    with ExitStack() as stack:
        one, other = staff.clients_of_both(stack).values()
        for _ in range(20):
            said = chat(one, store=True, metadata={"task_id": "across"})
            told = other.post("/feedback", json={"msg_ids": [said], "reward": 1}).json()
            assert told["outcomes"][said] in {"accepted", "pending"}
            eventually(lambda: one.post("/commit", json={"task_id": "across"}).json().get("committed") == 1)
            assert other.get(f"/v1/chat/completions/{chat(one)}").status_code == 200


def test_a_token_for_feedback_is_used_up_in_all_of_them(staff: Staff) -> None:
    with ExitStack() as stack:
        one, other = staff.clients_of_both(stack).values()
        said = chat(one)
        token = one.post("/v1/feedback_tokens", json={"msg_id": said, "max_events": 3}).json()["token"]
        headers, body = {"Authorization": f"Bearer {token}"}, {"msg_ids": [said]}
        answers = [
            client.post("/feedback", json=body | {"reward": number / 10}, headers=headers)
            for number, client in enumerate((one, other, one, other, one))
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 403, 403]
        assert answers[-1].json()["error"]["code"] == "token_used_up"


def test_metrics_are_those_of_the_whole_service(staff: Staff) -> None:
    with ExitStack() as stack:
        clients = list(staff.clients_of_both(stack).values())
        before = staff.metrics(clients[0])
        for client in clients:
            for _ in range(3):
                chat(client)
        for client in clients:
            found = staff.metrics(client)
            assert found["tuneloop_requests_total"] == before["tuneloop_requests_total"] + 6
            assert found["tuneloop_request_seconds_count"] == found["tuneloop_requests_total"]
            assert found["tuneloop_engines"] == 1
            assert found["tuneloop_database_up"] == 1


async def _stream(client: httpx.AsyncClient) -> str:
    async with client.stream("POST", CHAT, json=STREAM) as reply:
        assert reply.status_code == 200
        lines = [line async for line in reply.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    return str(json.loads(lines[0].removeprefix("data: "))["id"])


async def test_no_weights_change_before_both_know(staff: Staff) -> None:
    """Replies across a reload are marked, whoever of the two passes them on, and both serve the new version then."""
    staff.double.piece_pause_s = 2.0
    ledger, heard = staff.ledger(), len(staff.double.chats)
    new_connections = httpx.Limits(max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=staff.http.base_url, timeout=60, limits=new_connections) as client,
        asyncio.TaskGroup() as group,
    ):
        across = [group.create_task(_stream(client)) for _ in range(16)]
        while len(staff.double.chats) < heard + 16:  # noqa: ASYNC110 - the double hears them in another thread
            await asyncio.sleep(0.01)
        version = await asyncio.to_thread(register, ledger, job(staff.folder))
        await asyncio.to_thread(eventually, lambda: ledger.versions.champion().version == version)
        staff.double.piece_pause_s = 0.0
    assert ledger.versions.all()[version].state is VersionState.CHAMPION
    ledger.close()
    found = {record.msg_id: record.experiences[0] for record in exchanges_in(staff.root)}
    spoken = [found[task.result()] for task in across]
    marks = [(each.unsampled, each.version_min, each.version_max) for each in spoken]
    assert marks == [("mixed_version", 0, version)] * 16
    assert len({owner for owner, ids in staff.kept().items() for task in across if task.result() in ids}) == 2
    with ExitStack() as stack:
        for client in staff.clients_of_both(stack).values():
            assert client.post(CHAT, json=HELLO).headers["x-tuneloop-version"] == str(version)


def test_a_worker_that_is_killed_costs_nobody_else_anything(staff: Staff) -> None:
    with ExitStack() as stack:
        clients = staff.clients_of_both(stack)
        victim, survivor = staff.pids()
        lost, spared = clients[str(staff.owner_of(victim))], clients[str(staff.owner_of(survivor))]
        acknowledged = [chat(client) for client in (lost, spared) for _ in range(20)]
        before = staff.metrics(spared)
        os.kill(victim, signal.SIGKILL)
        for _ in range(20):
            acknowledged.append(chat(spared))
            with httpx.Client(base_url=staff.http.base_url, timeout=30) as fresh:
                acknowledged.append(chat(fresh))
        assert staff.metrics(spared)["tuneloop_requests_total"] >= before["tuneloop_requests_total"] + 40
        staff.wait_for_both()
        assert victim not in staff.pids()
        assert survivor in staff.pids()
        counts = spared.post("/feedback", json={"msg_ids": acknowledged, "reward": 1}).json()["counts"]
        assert counts["accepted"] + counts["pending"] == len(acknowledged)
        staff.clients_of_both(stack)
        after = staff.metrics(spared)
        assert after["tuneloop_requests_total"] >= before["tuneloop_requests_total"] + 40
        assert after["tuneloop_requests_in_flight"] == 0


@pytest.mark.contract
def test_a_worker_that_is_stopped_is_replaced_within_ten_seconds(staff: Staff) -> None:
    frozen, _ = staff.pids()
    os.kill(frozen, signal.SIGSTOP)
    eventually(lambda: frozen not in staff.pids(), within_s=10)
    staff.wait_for_both()


@pytest.mark.contract
@pytest.mark.parametrize("at_work", ["in its event loop", "in a thread"])
async def test_a_worker_whose_loop_is_blocked_is_ended_and_one_that_computes_in_a_thread_is_not(
    tmp_path: Path, at_work: str
) -> None:
    def compute(until: float) -> None:
        while time.monotonic() < until:
            pass

    async def serve(end: socket.socket) -> None:
        async def answer(_: object) -> None:
            pass

        channel = await Channel.over(end, answer)
        running = asyncio.create_task(channel.run())
        await asyncio.sleep(0.1)
        if at_work == "in a thread":
            await asyncio.to_thread(compute, time.monotonic() + 9)
            workers.stop()
        else:
            compute(time.monotonic() + 9)
        channel.close()
        await asyncio.gather(running, return_exceptions=True)

    class Worker(WorkerProcess):
        async def run(self, listening: socket.socket, answering: AnswerMessage) -> int:
            ours, theirs = socket.socketpair()
            serving = threading.Thread(target=asyncio.run, args=(serve(theirs),))
            self._channel = await Channel.over(ours, answering)
            self.owner = "it has served"
            serving.start()
            await self._channel.run()
            await asyncio.to_thread(serving.join)
            return -signal.SIGKILL

        def stop(self) -> None:
            pass

        def kill(self) -> None:
            killed.append(time.monotonic() - began)
            workers.stop()

    killed: list[float] = []
    with socket.socket() as unused:
        workers, began = Workers(settings_for(tmp_path), [unused], worker_of=Worker), time.monotonic()
        await workers.keep_running(0)
    if at_work == "in a thread":
        assert killed == []
    else:
        assert len(killed) == 1
        assert killed[0] < 10


def test_a_port_that_is_shared_among_workers_is_shared_with_nobody_else(tmp_path: Path) -> None:
    def wanted(port: int, workers: int) -> Settings:
        return settings_for(tmp_path, proxy_port=port, workers=workers)

    with ExitStack() as stack:
        port = listen(wanted(0, 2), stack)[0].getsockname()[1]
        for workers in (1, 2):
            with pytest.raises(EnvironmentRefused, match=f"127.0.0.1:{port}"):
                listen(wanted(port, workers), stack)


def test_when_the_control_process_dies_nothing_of_it_stays(staff: Staff) -> None:
    """Last of those that share a service: it ends here."""
    said, workers = chat(staff.http), descendants(staff.process.pid)
    assert len(workers) == 3, "two workers, and the verifier that waits for a version"
    staff.process.kill()
    staff.process.wait()
    eventually(lambda: not any(map(alive, workers)), within_s=5)
    assert staff.owner_of_reply(said)


def test_with_wait_both_end_their_replies_before_weights_change_and_before_they_stop(
    tmp_path: Path, double: EngineDouble
) -> None:
    double.piece_pause_s = 0.1
    with hired(tmp_path, double, on_reload="wait") as staff, ExitStack() as stack:
        clients, ledger = staff.clients_of_both(stack).values(), staff.ledger()
        pids, heard = staff.pids(), len(double.chats)
        double.hangs = True
        asking = [threading.Thread(target=client.post, args=[CHAT], kwargs={"json": STREAM}) for client in clients]
        for each in asking:
            each.start()
        eventually(lambda: len(double.chats) == heard + 2)
        version = register(ledger, job(tmp_path))
        reloading = 'tuneloop_engines{state="reloading"} 1.0'
        eventually(lambda: reloading in staff.http.get("/metrics").text)
        assert double.posts == []
        double.hangs = False
        for each in asking:
            each.join()
        eventually(lambda: ledger.versions.champion().version == version)
        streams = [stack.enter_context(each.stream("POST", CHAT, json=STREAM)) for each in clients]
        staff.process.send_signal(signal.SIGTERM)
        assert [[line for line in each.iter_lines() if line][-1] for each in streams] == ["data: [DONE]"] * 2
        assert staff.process.wait(60) == 0
        assert not any(map(alive, pids))
        assert {state for state, count in ledger.reports.counts().items() if count} == {State.RECORDED, State.TRAINED}
        ledger.close()


def test_a_worker_that_is_killed_at_its_first_start_is_started_again(tmp_path: Path, double: EngineDouble) -> None:
    settings = write_settings(tmp_path, explorer__workers=2, **attached_to(double))
    command = [sys.executable, "-m", "tuneloop.explorer", "--config", str(settings)]
    with WarmProcess(command, stderr=subprocess.PIPE) as process:
        staff = Staff(tmp_path, process, httpx.Client(), double)
        try:
            eventually(lambda: len(staff.pids()) == 2)
            victim = staff.pids()[0]
            os.kill(victim, signal.SIGKILL)
            eventually(lambda: victim not in staff.pids() and len(staff.pids()) == 2)
            time.sleep(3.0)  # so long one takes to serve
            assert len(staff.pids()) == 2
            assert process.poll() is None
        finally:
            process.kill()


async def test_a_worker_that_the_machine_cannot_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With growing pauses, unless none has ever served."""
    monkeypatch.setattr(control, "_PAUSE_S", 0.001)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    serves: set[int] = set()

    class Worker(WorkerProcess):
        async def run(self, listening: socket.socket, answering: AnswerMessage) -> int:
            if self.serial not in serves:
                return await super().run(listening, answering)
            self.owner = "it has served"
            if self.serial:
                workers.stop()
            return 1

    with socket.socket() as unused, capture_logs() as logs:
        workers = Workers(settings_for(tmp_path), [unused], worker_of=Worker)
        with pytest.raises(EnvironmentRefused, match="a worker cannot be started"):
            await workers.keep_running(0)
        serves, workers = {0, 3}, Workers(settings_for(tmp_path), [unused], worker_of=Worker)
        await workers.keep_running(0)
    assert [each["exit_code"] for each in logs if each["event"] == "worker_down"] == [1, os.EX_OSERR, os.EX_OSERR]
