"""Who can reach the Ray cluster that a trainer starts, and which clusters it refuses to be a part of."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import yaml

from tests.hostile.listening import LOOPBACK, listening
from tests.loop.harness.services import descendants, free_port, kill_tree
from tests.trainer.factories import commit, sample
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.ray_cluster import require_token

_RAY = str(Path(sys.executable).with_name("ray"))

pytestmark = pytest.mark.xdist_group("ray")


def stranger(port: int) -> str:
    """What somebody is told who shows no token: UNAUTHENTICATED, or another code where nobody speaks gRPC."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=10)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


@contextmanager
def trainer_of(folder: Path, settings, **environment: str) -> "Iterator[subprocess.Popen[bytes]]":
    config = folder / "trainer.yaml"
    config.write_text(yaml.safe_dump(settings.model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-m", "tuneloop.trainer", "--config", str(config)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"} | environment,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, (folder / "log").read_text()[-5000:]
    finally:
        process.kill()
        process.wait()


def test_a_trainers_own_cluster_listens_on_loopback_alone_and_answers_no_stranger(settings, ledger, tmp_path):
    commit(ledger, [sample(i) for i in range(8)])
    chosen = settings(trainer={"workers": 2, "save_interval": 1}, cluster={"ray_address": "local"})
    with trainer_of(tmp_path, chosen) as process:
        deadline = time.monotonic() + 900
        while ledger.reports.counts()["trained"] < 8:  # all that will ever listen does
            assert process.poll() is None, (tmp_path / "log").read_text()[-5000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        found = listening([process.pid, *descendants(process.pid)])
        answers = {port: stranger(port) for protocol, _, port in found if protocol.startswith("tcp")}
    assert [each for each in found if each[1] not in LOOPBACK] == []
    assert "OK" not in answers.values()
    assert "UNAUTHENTICATED" in answers.values()  # the head, whose question it is: others have no such service


@contextmanager
def cluster(**environment: str) -> Iterator[str]:
    """The address of a cluster that somebody else has started."""
    port, folder = free_port(), f"/tmp/ray-{os.getpid()}-ports"
    flags = ["--num-cpus=1", "--object-store-memory=80000000", "--include-dashboard=false", "--disable-usage-stats"]
    process = subprocess.Popen(
        [_RAY, "start", "--head", "--block", f"--port={port}", f"--temp-dir={folder}", *flags],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while stranger(port) not in {"OK", "UNAUTHENTICATED"}:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield f"127.0.0.1:{port}"
    finally:
        kill_tree(process)  # asked to end, it may take minutes on a busy machine


def test_a_cluster_that_runs_what_anybody_sends_is_refused_but_in_a_laboratory():
    with cluster(RAY_AUTH_MODE="disabled") as address:
        with pytest.raises(EnvironmentRefused, match="RAY_AUTH_MODE=token"):
            require_token(address, insecure=False)
        require_token(address, insecure=True)


def test_a_cluster_that_asks_for_a_token_is_joined_with_it_and_by_nobody_else(settings, tmp_path):
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32}
    with cluster(**token) as address:
        require_token(address, insecure=False)
        join = f"import ray; ray.init({address!r}, log_to_driver=False); print(ray.get(ray.put('joined')))"
        ran = [
            subprocess.run([sys.executable, "-c", join], env=os.environ | given, capture_output=True, timeout=120)
            for given in (token, token | {"RAY_AUTH_TOKEN": "u" * 32}, {"RAY_AUTH_MODE": "disabled"})
        ]
    assert [b"joined" in each.stdout for each in ran] == [True, False, False], [each.stderr[-800:] for each in ran]
