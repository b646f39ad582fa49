"""The service as its users start it: `python -m tuneloop.explorer` in a process of its own."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.doubles.engine import CHAT, MODEL, EngineDouble
from tests.doubles.warm.process import WarmProcess
from tests.explorer.checkpoints import write_model
from tests.explorer.running import HELLO, eventually
from tests.outboxes import exchanges_in
from tuneloop.explorer.__main__ import serve
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import Exchange, State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.settings.loader import load_settings


def write_settings(folder: Path, **but: Any) -> Path:
    settings: dict[str, Any] = {
        "mode": "serve",
        "checkpoint_root_dir": str(folder / "checkpoints"),
        "model": {"model_path": str(write_model(folder / "model")), "served_model_name": MODEL},
        "explorer": {"listen_address": "127.0.0.1", "proxy_port": 0, "rollout_model": {"dtype": "float32"}},
    }
    for name, value in but.items():
        section = settings
        *above, last = name.split("__")
        for each in above:
            section = section.setdefault(each, {})
        section[last] = value
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def ended(settings: Path) -> tuple[int, str]:
    """The exit code of a service that does not start, and the one sentence that it ends with."""
    command = [sys.executable, "-m", "tuneloop.explorer", "--config", str(settings)]
    with WarmProcess(command, stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=120)
    reply = [line for line in errors.splitlines() if not re.match(r"\d{4}-\d\d-\d\d", line)]
    assert len(reply) == 1, errors
    return process.returncode, reply[0]


def refused(settings: Path, *words: str) -> str:
    """The sentence that names the setting and the cure."""
    with pytest.raises(EnvironmentRefused) as caught:
        serve(load_settings(settings))
    reply = str(caught.value)
    assert "\n" not in reply
    assert all(word in reply for word in words), reply
    return reply


def job(folder: Path) -> Path:
    return folder / "checkpoints" / "tuneloop" / "default"


ATTACHED = {"explorer__rollout_model__engine_urls": ["http://127.0.0.1:9"]}


def test_a_model_that_is_not_there_is_said(tmp_path: Path) -> None:
    code, reply = ended(write_settings(tmp_path, model__model_path="/nowhere", **ATTACHED))
    assert code == 3
    assert reply.startswith("model.model_path: /nowhere is not a model folder")
    assert "give the folder" in reply
    assert not (tmp_path / "checkpoints").exists()


def test_settings_that_are_wrong_are_said(tmp_path: Path) -> None:
    code, reply = ended(write_settings(tmp_path, explorer__proxy_prot=1))
    assert code == 2
    assert "explorer.proxy_prot" in reply
    assert "proxy_port" in reply
    assert not (tmp_path / "checkpoints").exists()


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused(write_settings(tmp_path, explorer__proxy_port=port, **ATTACHED), "explorer.proxy_port", str(port))
    assert not list(job(tmp_path).glob("buffer/*"))


def test_a_database_that_is_not_there_is_said(tmp_path: Path) -> None:
    url = "postgresql://someone:secret@127.0.0.1:9/none"
    settings = write_settings(tmp_path, buffer__trainer_input__experience_buffer__path=url, **ATTACHED)
    reply = refused(settings, "buffer.trainer_input.experience_buffer.path", "127.0.0.1:9", "start it")
    assert "secret" not in reply


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = write_settings(tmp_path, checkpoint_root_dir=str(tmp_path / "file" / "below"), **ATTACHED)
    refused(settings, "checkpoint_root_dir", "choose another folder")
    settings = write_settings(tmp_path, explorer__outbox_dir="/proc/outbox", **ATTACHED)
    refused(settings, "explorer.outbox_dir", "choose another folder")


def test_a_key_that_is_none_is_said(tmp_path: Path) -> None:
    key = job(tmp_path) / "secrets" / "msg_id.key"
    key.parent.mkdir(parents=True)
    key.write_bytes(b"short")
    refused(write_settings(tmp_path, **ATTACHED), "msg_id.key", "restore it")


@pytest.mark.vllm
def test_an_engine_that_dies_at_start_is_said(tmp_path: Path) -> None:
    settings = write_settings(tmp_path, explorer__rollout_model__single_process=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["Nonsense"], "model_type": "none"}))
    code, reply = ended(settings)
    assert code == 3
    assert reply.startswith("explorer.rollout_model: engine 0 died at start")
    assert "engine-0.log" in reply


@contextmanager
def service(settings: Path, *, ready: bool = True) -> Iterator[tuple["subprocess.Popen[bytes]", httpx.Client]]:
    """The service, ready unless that is not waited for; killed in the end if it still runs."""
    command = [sys.executable, "-m", "tuneloop.explorer", "--config", str(settings)]
    with WarmProcess(command, stderr=subprocess.PIPE) as running:
        assert running.stderr is not None
        try:
            url = _url(running)
            with httpx.Client(base_url=url, timeout=30) as http:
                if ready:
                    eventually(lambda: http.get("/health/ready").status_code == 200)
                yield running, http
        finally:
            running.kill()


def _url(running: "subprocess.Popen[bytes]") -> str:
    assert running.stderr is not None
    reply, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([running.stderr], [], [], 0.1)[0]:
            reply += os.read(running.stderr.fileno(), 1 << 16)
        if found := re.search(rb"explorer_listening.*url=(\S+)", reply):
            return found[1].decode()
    raise AssertionError(reply.decode())


def kept(folder: Path) -> list[Exchange]:
    """The exchanges on disk, in the outbox of whatever process."""
    return exchanges_in(job(folder) / "outbox")


def stored(folder: Path) -> dict[State, int]:
    ledger = Ledger(connect(f"sqlite:///{job(folder)}/buffer/exp_buffer.db"))
    found = ledger.reports.counts()
    ledger.close()
    return found


def attached_to(double: EngineDouble) -> dict[str, Any]:
    return {"explorer__rollout_model__engine_urls": [double.url]}


def test_a_service_killed_right_at_the_end_of_a_stream_has_kept_it(tmp_path: Path, double: EngineDouble) -> None:
    settings = write_settings(tmp_path, **attached_to(double))
    with service(settings) as (running, http):
        with http.stream("POST", CHAT, json=HELLO | {"stream": True}) as reply:
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    running.send_signal(signal.SIGKILL)
                    break
                if line:
                    body = json.loads(line.removeprefix("data: "))["id"]
        assert running.wait(60) == -signal.SIGKILL
    assert [each.msg_id for each in kept(tmp_path)] == [body]
    with service(settings) as (running, http):
        assert http.post("/feedback", json={"msg_ids": [body], "reward": 1}).status_code == 200
        assert http.post("/commit").json()["committed"] == 1
        running.send_signal(signal.SIGKILL)
    assert stored(tmp_path)[State.COMMITTED] == 1


def test_a_service_told_to_stop_stops_cleanly(tmp_path: Path, double: EngineDouble) -> None:
    with service(write_settings(tmp_path, **attached_to(double))) as (running, http):
        reply = [http.post(CHAT, json=HELLO).json()["id"] for _ in range(10)]
        http.post("/feedback", json={"msg_ids": reply, "reward": 1})
        started = time.monotonic()
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
        assert time.monotonic() - started < 15
    assert stored(tmp_path)[State.REWARDED] == 10
    written = [each for each in job(tmp_path).rglob("*") if each.is_file()]
    assert len(written) > 3
    assert not [each for each in written if each.stat().st_mode & 0o077]  # what clients said is nobody else's


def test_a_service_that_is_interrupted_lets_streams_end(tmp_path: Path, double: EngineDouble) -> None:
    double.piece_pause_s = 0.1
    with service(write_settings(tmp_path, **attached_to(double))) as (running, http):
        with http.stream("POST", CHAT, json=HELLO | {"stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            running.send_signal(signal.SIGINT)
            assert list(lines)[-2] == "data: [DONE]"
        assert running.wait(60) == 0
    assert stored(tmp_path)[State.RECORDED] == 1


def test_an_engine_that_tells_raw_logprobs_is_not_attached(tmp_path: Path, double: EngineDouble) -> None:
    double.raw_logprobs = True
    with service(write_settings(tmp_path, **attached_to(double)), ready=False) as (_, http):
        eventually(lambda: double.asked_for_one >= 2)  # and again, for its owner may start it anew
        assert http.get("/health/ready").status_code == 503
        double.raw_logprobs = False
        eventually(lambda: http.get("/health/ready").status_code == 200)
