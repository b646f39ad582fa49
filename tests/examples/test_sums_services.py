"""The demo's processes: what fails says so, and nothing stays behind."""

import time
from pathlib import Path

import pytest

from examples.sums.services import ServiceFailed, Services

pytestmark = pytest.mark.contract

SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("told to stop", flush=True)))
print("running", flush=True)
time.sleep(60)
"""


def until(log: Path, said: str) -> None:
    deadline = time.monotonic() + 30
    while said not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_service_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    missing, log = tmp_path / "missing.yaml", tmp_path / "trainer.log"
    with Services(("trainer",), config=missing, logs={"trainer": log}) as services:
        until(log, "missing.yaml")
        services.wait()
        with pytest.raises(ServiceFailed) as failure:
            services.check()
    assert "the trainer ended with exit code 2" in str(failure.value)
    assert str(log) in str(failure.value)
    assert "missing.yaml" in str(failure.value)


def test_leaving_the_block_stops_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tuneloop").mkdir()
    (tmp_path / "tuneloop" / "sleeper.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "sleeper.log"
    with Services(("sleeper",), config=tmp_path / "any.yaml", logs={"sleeper": log}) as services:
        until(log, "running")
        services.check()
    with pytest.raises(ServiceFailed, match="exit code 0"):
        services.check()
    assert "told to stop" in log.read_text()
