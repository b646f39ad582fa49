"""What a worker of Ray Train does before it trains, and says of what it cannot; without a cluster."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ray

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.trainer.workers import rank, ray_workers


@pytest.fixture
def work(monkeypatch, tmp_path):
    """Has a worker work; why it refused to."""
    board = ray_workers.StopActor()
    refuse = SimpleNamespace(remote=board.refuse)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "get", lambda reference: reference)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setattr(ray_workers, "_rendezvous", lambda **_: nullcontext())
    before = os.umask(0o022)

    def do(settings):
        ray_workers.work({"settings": settings, "board": SimpleNamespace(refuse=refuse), "folder": str(tmp_path)})

    yield do, board
    os.umask(before)


def test_a_worker_redacts_its_errors_and_writes_no_core_files(work, settings, monkeypatch):
    done = []
    chosen = settings()
    monkeypatch.setattr(ray_workers, "configure_logging", lambda: done.append("log"))
    monkeypatch.setattr(ray_workers, "redact_crash_reports", done.append)
    monkeypatch.setattr(rank, "train_as_worker", lambda *_: pytest.fail("too early") if len(done) < 2 else None)
    work[0](chosen)
    assert done == ["log", chosen.privacy]


def test_a_node_without_a_folder_is_named_with_the_folder(work, settings, tmp_path, monkeypatch):
    do, board = work
    monkeypatch.setattr(ray_workers, "configure_logging", lambda: None)
    monkeypatch.setattr(ray_workers, "redact_crash_reports", lambda _: None)
    with pytest.raises(EnvironmentRefused):
        do(settings(model={"model_path": tmp_path / "nowhere"}))
    code, sentence = board.refusal()
    assert code == 3
    assert sentence.startswith(f"on 10.0.0.7: model.model_path: {tmp_path}/nowhere is not there; name a local folder")

    missing = tmp_path / "tuneloop" / "default" / "global_step_4"
    monkeypatch.setattr(rank, "train_as_worker", lambda *_: (missing / "config.json").read_text())
    do, board._refusal = work[0], None
    with pytest.raises(EnvironmentRefused):
        do(settings())
    _, sentence = board.refusal()
    assert sentence.startswith("on 10.0.0.7: checkpoint_root_dir: ")
    assert str(missing) in sentence
