"""The service that tune() has started is killed half-way: tune() ends by its rule, and resuming it loses nothing."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from tests.doubles.warm.process import BOTH, WarmProcess
from tests.loop.harness.services import alive, children, command_of, descendants, make_model, wait_for
from tests.runner.tuning.interrupting.started import TASKS
from tuneloop.shared.settings.loader import load_settings

pytestmark = pytest.mark.contract

RUNS = 2 * len(TASKS)


def start(model: Path, folder: Path, log: Path) -> WarmProcess:
    command = [sys.executable, "-m", "tests.runner.tuning.interrupting.started", str(model), str(folder)]
    with log.open("ab") as output:
        return WarmProcess(command, modules=BOTH, starts=True, stdout=output, stderr=subprocess.STDOUT)


def journal(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for file in folder.glob("AgentScope/*/tune/journal.jsonl")
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def acknowledged(folder: Path) -> list[str]:
    return [run for line in journal(folder) if line["event"] == "acknowledged" for run in line["runs"]]


def rewards(folder: Path) -> dict[str, float]:
    """What the service's database has of each run, by `task/run`."""
    [config] = folder.glob("AgentScope/*/tune/model.yaml")
    engine = create_engine(load_settings(config).database_url)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT task_id, run_id, value FROM feedback WHERE metric = 'reward'")).all()
    engine.dispose()
    kept = {f"{task}/{run}": value for task, run, value in rows}
    assert len(kept) == len(rows), "no reward is there twice"
    return kept


@pytest.mark.vllm
def test_it_stops_by_its_rule_and_resuming_loses_nothing(tmp_path: Path) -> None:
    model, folder, log = make_model(tmp_path / "model"), tmp_path / "runs", tmp_path / "log"
    script = start(model, folder, log)

    def second_step_is_under_way() -> bool:
        assert script.poll() is None, log.read_text()
        return len(acknowledged(folder)) > 6

    wait_for(second_step_is_under_way, timeout_s=150, why="no second step")
    [service] = [each for each in children(script.pid) if "run" in command_of(each)]
    below = descendants(service)
    os.killpg(service, signal.SIGKILL)
    for each in below:  # the services under it are in sessions of their own
        if alive(each):
            os.kill(each, signal.SIGKILL)
    assert script.wait(120) == 1
    said = log.read_text()
    assert "ServiceAway: the service ended with exit code -9; its log is" in said
    before = acknowledged(folder)
    assert 6 < len(before) < RUNS

    again = start(model, folder, log)
    assert again.wait(500) == 0, log.read_text()
    assert "resuming after step" in log.read_text()
    results = {
        f"{line['task_id']}/{line['run_id']}": line["rewards"]["model"]
        for line in journal(folder)
        if line["event"] == "result" and line["rewards"]
    }
    kept = rewards(folder)
    assert kept == pytest.approx(results)
    assert {*before} <= kept.keys()
    assert sorted(Counter(name.partition("/")[0] for name in kept).values()) == [2] * len(TASKS)
    assert [line["step"] for line in journal(folder) if line["event"] == "committed"] == [0, 1, 2, 3]
