"""What a worker of Ray Train does before it trains, without a cluster."""

import os
import sys
from types import ModuleType

import pytest

from tuneloop.trainer.workers import rank, ray_workers


def test_a_worker_redacts_its_errors_and_writes_no_core_files(settings, tmp_path, monkeypatch):
    done = []
    chosen = settings()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setattr(ray_workers, "configure_logging", lambda: done.append("log"))
    monkeypatch.setattr(ray_workers, "redact_crash_reports", done.append)
    monkeypatch.setattr("tuneloop.trainer.ranks.ranks.JoinedRanks", lambda *_, **__: None)
    monkeypatch.setattr(rank, "serve", lambda *_: pytest.fail("it begins too early") if len(done) < 2 else None)
    before = os.umask(0o022)
    try:
        ray_workers.work({"settings": chosen, "board": None, "folder": str(tmp_path)})
    finally:
        os.umask(before)
    assert done == ["log", chosen.privacy]
