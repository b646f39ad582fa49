"""Engine and trainer that work by turns: everything is answered and learnt, and whoever dies holds nobody up."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.loop.harness.agent import Agent
from tests.loop.harness.services import (
    Service,
    client_of_engine,
    command_of,
    descendants,
    ledger_of,
    wait_for,
    write_settings,
)
from tuneloop.shared.job_marks import GpuLocks
from tuneloop.shared.settings.settings import Settings

pytestmark = pytest.mark.vllm

TURN_S = 2.0


def by_turns(folder: Path, model: Path) -> Path:
    return write_settings(folder, model, cluster={"gpu_turn": TURN_S})


def turns_of(service: Service) -> int:
    """How often the trainer has had a turn and the engine answered afterwards."""
    text = httpx.get(f"{service.url}/metrics", timeout=60).text
    [line] = [each for each in text.splitlines() if each.startswith("tuneloop_gpu_turn_seconds_count")]
    return int(float(line.split()[-1]))


def is_held(settings: Settings) -> bool:
    locks = GpuLocks.of(settings.job_dir)
    try:
        return locks.held.is_held_by_another()
    finally:
        locks.close()


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(by_turns(tmp_path_factory.mktemp("turns"), model), "both")
    try:
        service.wait_until_ready()
        yield service
    finally:
        assert service.stop() == 0


def test_a_reply_goes_on_after_the_trainers_turn(both: Service) -> None:
    """The same tokens as without, of one version: nobody has trained yet."""
    ask = {
        "model": both.settings.served_model_name,
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 700,
        "temperature": 0,
        "ignore_eos": True,
        "metadata": {"train": "false"},
    }
    url = f"{both.url}/v1/chat/completions"
    expected = httpx.post(url, json=ask, timeout=120).json()["choices"][0]["message"]["content"]
    locks, before, got = GpuLocks.of(both.settings.job_dir), turns_of(both), []

    def stream() -> None:
        with httpx.stream("POST", url, json=ask | {"stream": True}, timeout=120) as reply:
            got.extend(reply.iter_lines())

    reading = threading.Thread(target=stream)
    reading.start()
    wait_for(lambda: len(got) > 20)
    try:  # as a trainer does
        wait_for(locks.wanted_by_trainer.take)
        wait_for(locks.held.take)
        locks.wanted_by_trainer.release()
        with client_of_engine(both) as engine:
            wait_for(lambda: engine.get("/is_sleeping").json() == {"is_sleeping": True})
        assert httpx.get(f"{both.url}/health/ready", timeout=60).status_code == 200
        stood_at = len(got)
        late = threading.Thread(target=lambda: got.append(str(httpx.post(url, json=ask, timeout=120).status_code)))
        late.start()
        late.join(1.5)
        assert late.is_alive()
        assert len(got) <= stood_at + 1
    finally:
        locks.close()
    reading.join(120)
    late.join(120)
    assert got[-1] == "200"
    assert turns_of(both) > before
    text = "".join(
        piece["choices"][0]["delta"].get("content") or ""
        for line in got
        if line.startswith("data: {") and (piece := httpx.Response(200, text=line[6:]).json())["choices"]
    )
    assert text == expected


def test_the_loop_goes_on_by_turns_and_no_request_fails(both: Service) -> None:
    agent = Agent(both.url, both.settings.served_model_name)
    ledger = ledger_of(both.settings)
    agent.work(64)
    agent.work(64)
    assert agent.failures == []
    assert len(agent.acknowledged) == 128
    # Taken up though they come in the trainer's turns, of which one may make several.
    made = ledger.versions.newest().version
    wait_for(lambda: ledger.versions.champion().version >= made, timeout_s=30)
    wait_for(lambda: ledger.versions.champion().version >= 2, timeout_s=90)
    assert ledger.reports.imbalance() == []
    ledger.close()
    before = turns_of(both)
    assert before >= 1
    agent.work(32)
    wait_for(lambda: turns_of(both) > before)


def test_whoever_is_killed_in_the_trainers_turn_holds_nobody_up(model: Path, tmp_path: Path) -> None:
    explorer = Service(by_turns(tmp_path, model), "explorer")
    locks = None
    try:
        explorer.wait_until_ready()
        assert is_held(explorer.settings)
        locks = GpuLocks.of(explorer.settings.job_dir)
        assert not locks.held.take()
        wait_for(locks.wanted_by_trainer.take)
        wait_for(locks.held.take)
        guards = [pid for pid in descendants(explorer.process.pid) if any("guard" in each for each in command_of(pid))]
        explorer.kill()
        assert guards
        for pid in guards:  # the engine's end, asleep or not, is the guards'
            wait_for(lambda pid=pid: not Path(f"/proc/{pid}").exists(), timeout_s=45)
        again = Service(tmp_path / "tuneloop.yaml", "explorer")
        try:
            wait_for(locks.wanted_by_engine.is_held_by_another)
            time.sleep(1)
            assert not [pid for pid in descendants(again.process.pid) if "--served-model-name" in command_of(pid)]
            locks.close()  # the trainer's end
            again.wait_until_ready()
            assert is_held(again.settings)
        finally:
            assert again.stop() == 0
        wait_for(lambda: not is_held(again.settings))
    finally:
        if locks is not None:
            locks.close()
        if explorer.process.poll() is None:
            os.killpg(explorer.process.pid, signal.SIGKILL)
