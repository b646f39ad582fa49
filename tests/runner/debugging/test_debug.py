"""A workflow run once by `tuneloop debug`, and by a file's own switch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.packages import ROOT
from tests.doubles.engine import MODEL
from tests.explorer.running import RunningExplorer
from tuneloop.runner.tuning import tune as tuning
from tuneloop.runner.tuning.debugging import load_function

AGENT = '''
"""An agent, its judge, and ways to get it wrong."""

from openai import AsyncOpenAI

from tuneloop.runner.tuning.config import JudgeOutput, WorkflowOutput


async def workflow(task, model, auxiliary_models=None):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.chat.completions.create(model=model.model_name, messages=messages)
    again = await model.chat.completions.create(model=model.model_name, messages=messages)
    return WorkflowOutput(response=reply.choices[0].message.content, metrics={"steps": 2})


def judge(task, response):
    return JudgeOutput(reward=0.5, metrics={"length": len(response)})


async def rewarded(task, model):
    await workflow(task, model)
    return 0.25


async def with_a_client_of_its_own(task, runs):
    run = runs["model"]
    async with AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        asked = [{"role": "user", "content": task["question"]}]
        await client.chat.completions.create(model="MODEL", messages=asked)
    return 0.75


async def silent_itself(task, run):
    return 1.0


async def silent(task, model):
    return WorkflowOutput(reward=1.0)


async def unrewarded(task, model):
    return await workflow(task, model)


async def hostile(task, model):
    await rewarded(task, model)
    return WorkflowOutput(response="\\x1b]0;owned\\x07", reward=0.5)


async def broken(task, model):
    await workflow(task, model)
    raise KeyError("no such tool")


def wrong(question, model): ...


if __name__ == "__main__":
    from tuneloop.runner.tuning.tune import main

    main(workflow_func=workflow, judge_func=judge, train_dataset=[{"question": "3+4="}, {"question": "5+6="}])
'''.replace("MODEL", MODEL)


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    return file


def run(*command: str, module: str = "tuneloop.runner") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment["PYTHONPATH"] = str(ROOT / "build" / "links")
    line = [sys.executable, "-P", *(["-m", module] if module else []), *command]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_run_is_shown_with_its_reward_and_its_calls(explorer: RunningExplorer, agent: Path) -> None:
    task = json.dumps({"question": "3+4="})
    done = run("debug", f"{agent}:workflow", "--judge", "judge", "--task", task, "--service", explorer.url)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    kept = explorer.exchanges()
    assert [(each.task_id, each.experiences[0].drop_reason) for each in kept] == [("debug", "opt_out")] * 2
    assert lines[0].startswith("response: ")
    assert lines[1] == "reward: 0.5"
    assert lines[2].startswith("metrics: steps=2 length=")
    assert lines[3].startswith("calls: 2, ")
    tokens = sum(len(each.experiences[0].prompt_ids + each.experiences[0].completion_ids) // 4 for each in kept)
    assert lines[6] == f"in training: {tokens} tokens in 2 sequences, of {tokens} call by call"
    assert [line.startswith("  turn 2 ") for line in lines[7:]] == [True]
    for number, line in enumerate(lines[4:6]):
        assert f"{number + 1}. chat/completions: status 200" in line
        assert line.endswith(kept[number].msg_id)
    body = json.loads(kept[0].request)
    assert "temperature" not in body


def test_any_compatible_model_will_do(explorer: RunningExplorer, agent: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "3+4="}\n{"question": "5+6="}\n')
    where = ("--base-url", f"{explorer.url}/v1", "--model", MODEL, "--temperature", "0.5")
    done = run("debug", f"{agent}:rewarded", "--dataset", str(tmp_path / "train.jsonl"), "--index", "1", *where)
    assert (done.returncode, "reward: 0.25" in done.stdout) == (0, True), done.stderr
    body = json.loads(explorer.exchanges()[-1].request)
    assert (body["messages"][0]["content"], body["temperature"]) == ("5+6=", 0.5)
    assert explorer.exchanges()[-1].run_id is None


def test_calls_of_clients_of_its_own_are_counted(explorer: RunningExplorer, agent: Path) -> None:
    asked = (f"{agent}:with_a_client_of_its_own", "--task", '{"question": "3+4="}')
    done = run("debug", *asked, "--service", explorer.url)
    assert (done.returncode, "calls: 0, 0 + 0 tokens" in done.stdout) == (0, True), done.stderr
    assert "\ncalls by clients of the workflow's own: 1\n" in done.stdout
    (kept,) = explorer.exchanges()
    assert (kept.task_id, kept.experiences[0].drop_reason) == ("debug", "opt_out")


def test_the_command_of_the_service_is_the_same(explorer: RunningExplorer, agent: Path) -> None:
    code = "from tuneloop.cli.main import main; main()"
    where = ("--task", '{"question": "3+4="}', "--service", explorer.url)
    done = run("-c", code, "debug", f"{agent}:rewarded", *where, module="")
    assert (done.returncode, "reward: 0.25" in done.stdout) == (0, True), done.stderr
    helped = run("-c", code, "debug", "--help", module="")
    assert (helped.returncode, "--judge" in helped.stdout) == (0, True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("silent_itself", "nothing would be learnt from this run: it called no model"),
        ("silent", "nothing would be learnt from this run: it called no model"),
        ("unrewarded", "nothing would be learnt from this run: it has no reward"),
        ("broken", "KeyError: 'no such tool'"),
    ],
)
def test_what_goes_wrong_is_said(explorer: RunningExplorer, agent: Path, name: str, why: str) -> None:
    done = run("debug", f"{agent}:{name}", "--task", '{"question": "3+4="}', "--service", explorer.url)
    assert done.returncode == 1
    assert why in done.stderr
    assert f"calls: {0 if name.startswith('silent') else 2}, " in done.stdout


def test_a_file_debugs_or_trains_by_a_switch(
    explorer: RunningExplorer, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(str(agent), "--backbone=debug", "--service", explorer.url, "--index", "1", module="")
    assert (done.returncode, "reward: 0.5" in done.stdout) == (0, True), done.stderr
    assert json.loads(explorer.exchanges()[0].request)["messages"][0]["content"] == "5+6="
    tuned: list[dict[str, Any]] = []
    monkeypatch.setattr(tuning, "tune", lambda **how: tuned.append(how) or "result")
    workflow = load_function(f"{agent}:workflow")
    assert (
        tuning.main(["--backbone=trinity", "--resume", "--service", "http://there"], workflow_func=workflow) == "result"
    )
    assert tuning.main([], workflow_func=workflow, service="http://here") == "result"
    assert tuned == [
        {"workflow_func": workflow, "resume": True, "service": "http://there"},
        {"workflow_func": workflow, "service": "http://here"},
    ]
    assert run(str(agent), "--backbone=debug", module="").returncode == 2  # no model is named


def test_what_a_model_wrote_commands_no_terminal(explorer: RunningExplorer, agent: Path) -> None:
    done = run("debug", f"{agent}:hostile", "--task", '{"question": "3+4="}', "--service", explorer.url)
    assert done.stdout.splitlines()[0] == r"response: \x1b]0;owned\x07"
