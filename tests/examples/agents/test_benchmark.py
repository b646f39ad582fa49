"""The benchmark of the agents: runs side by side, what is kept of those that fail, tables and curves."""

import argparse
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.learning import agents


def summary(seed: int, after: float) -> dict[str, object]:
    metrics = {"reward": 0.5, "wins": after, "survival": 0.5}
    evaluations = [{"step": step, **metrics} for step in (0, 10)]
    before = {**metrics, "wins": 0.5}
    return {"seed": seed, "steps": 10, "before": before, "after": metrics, "evaluations": evaluations}


def write_journal(folder: Path) -> None:
    journal = folder / "checkpoints" / "AgentScope" / "werewolf-0-20260101000000" / "tune" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    lines = [
        {"event": "evaluated", "step": step, "version": step, "rewards": [wins, wins], "metrics": {"wins": wins}}
        for step, wins in ((0, 0.5), (5, 0.75))
    ]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "eval')


def test_runs_are_kept_as_they_end_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def run(trial: agents.Trial, options: argparse.Namespace, folder: Path) -> tuple[int, str]:
        made.append(trial.name)
        folder.mkdir(parents=True)
        if trial.seed == 2:
            return 1, "it broke"
        (folder / "summary.json").write_text(json.dumps(summary(trial.seed, 0.8)))
        return 0, ""

    monkeypatch.setattr(agents, "_run", run)
    given = [
        "--example",
        "werewolf",
        "--parallel",
        "2",
        "--out",
        str(tmp_path / "out"),
        "--work",
        str(tmp_path / "work"),
    ]
    assert agents.main(given) == 1
    assert "| werewolf  | judge | wins | 0.500 0.500 | 0.800 0.800 | 0.500 | 0.800 |" in capsys.readouterr().out
    assert "it broke" in (tmp_path / "out" / "failures.log").read_text()
    assert sorted(made) == ["werewolf-judge-0", "werewolf-judge-1", "werewolf-judge-2"]
    monkeypatch.setattr(agents, "_run", lambda *_: (1, "again"))
    agents.main(given)
    assert len(json.loads((tmp_path / "out" / "agents.json").read_text())) == 2
    ElementTree.parse(tmp_path / "out" / "werewolf.svg")
    assert agents.main([*given, "--report", "--curves", str(tmp_path / "curves")]) == 0
    assert [file.name for file in (tmp_path / "curves").iterdir()] == ["werewolf.svg"]


def test_of_a_run_that_was_stopped_is_kept_what_it_had_evaluated(tmp_path: Path) -> None:
    trial = agents.Trial(example="werewolf", seed=0)
    assert agents.line_of(trial, tmp_path) == {}
    write_journal(tmp_path)
    line = agents.line_of(trial, tmp_path)
    assert (line["before"]["wins"], line["after"]["wins"], line["steps"]) == (0.5, 0.75, 5)
    assert "werewolf judge 0: 5 steps; reward 0.500 -> 0.750, wins 0.500 -> 0.750" in agents.one_line(line)


def test_a_run_that_takes_too_long_is_stopped_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho began\nsleep 60 &\nwait\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    options = argparse.Namespace(
        work=tmp_path, gpu=False, timeout=1.0, model=None, steps=3, batch=None, group=None, rate=None,
        evaluate_every=None, held_out=None, gpu_share=None,
    )  # fmt: skip
    assert agents._run(agents.Trial(example="werewolf", seed=0), options, tmp_path / "run") == (124, "began\n")
