"""Files with tasks as commands read them, and what a program that calls tune() is told where it is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_main import tuneloop
from tests.doubles.serving import serving
from tests.runner.tuning.service_double import ServiceDouble
from tuneloop.runner import Algorithm, AlgorithmConfig, Dataset, TunerChatModel, TuneRefused
from tuneloop.runner.tuning import tune_command
from tuneloop.runner.tuning.config import ServicePlace, service_settings
from tuneloop.runner.tuning.services import ServiceProcess

FILE = """
algorithm: {algorithm_type: grpo, repeat_times: 2}
buffer:
  batch_size: 2
  explorer_input:
    taskset: {path: tasks.jsonl, workflow_args: {side: good}, task_selector: {selector_type: random}}
    default_workflow_type: math_workflow
synchronizer: {sync_method: nccl}
"""

WORKFLOW = """
from tuneloop.runner import WorkflowOutput

SIDES = []


async def solve(task, model):
    SIDES.append((task["n"], task["workflow_args"]["side"]))
    await model.chat.completions.create(model=model.model_name, messages=[{"role": "user", "content": "1+1"}])
    return WorkflowOutput(response="2")


def judge(task, response):
    from trinity.common.rewards.math_reward import MathBoxedRewardFn
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (tmp_path / "file.yaml").write_text(FILE)
    (tmp_path / "written.py").write_text(WORKFLOW)
    return tmp_path


def test_a_service_is_not_started_with_a_file_of_tasks(folder: Path) -> None:
    sentence = "file.yaml names tasks, and with `tuneloop run` nothing will ask for replies: tuneloop tune file.yaml"
    with (folder / "file.yaml").open("a") as file:
        file.write("model: {model_path: some/model}\n")
    told = tuneloop("validate", "-c", "file.yaml")
    assert (told.code, told.output.splitlines()[0]) == (0, sentence)
    assert "is valid" not in told.output
    assert (started := tuneloop("run", "-c", "file.yaml")).code == 2
    assert sentence in started.errors


def test_tune_runs_a_files_tasks_by_a_workflow_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_command.main(["file.yaml"]) == 2
    assert "math_workflow is Trinity's own. Write one (docs/tune.md)" in capsys.readouterr().err
    assert tune_command.main(["file.yaml", "--workflow", "nowhere:solve"]) == 2
    assert "No module named 'nowhere'" in capsys.readouterr().err
    with serving(ServiceDouble()) as url:
        options = ["--workflow", "written:solve", "--judge", "written.py:judge", "--service", url]
        assert tune_command.main(["file.yaml", *options]) in {1, 2}
    sides = sys.modules["written"].SIDES
    assert sorted({*sides}) == [(1, "good"), (2, "good")]
    output = capsys.readouterr()
    assert "No module named 'trinity'. Trinity's rewards start Ray; ours do the same without" in output.out
    assert "numeric() is MathRewardFn" in output.out


def test_names_of_agentscopes_tuner() -> None:
    assert (Algorithm, Dataset("x").path, TunerChatModel("m").model_path) == (AlgorithmConfig, "x", "m")
    for line, sentence in (
        ("from tuneloop.runner import tune_prompt", "tuneloop tunes weights, not prompts"),
        ("from tuneloop.runner.model_selection import select_model", "docs/versions.md"),
    ):
        with pytest.raises(ImportError, match=sentence):
            exec(line)  # noqa: S102 - as a sample has it


def run_as_program(folder: Path, call: str) -> "subprocess.CompletedProcess[str]":
    text = f"from tuneloop.runner import *\ndef solve(task, model): pass\ntune(workflow_func=solve, {call})\n"
    (folder / "main.py").write_text(text)
    return subprocess.run([sys.executable, "main.py"], cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_refused_setting_is_a_sentence_without_a_traceback(folder: Path) -> None:
    ended = run_as_program(folder, "train_dataset=[{}], algorithm=AlgorithmConfig('grpo', group_size=2), retries=-1")
    sentence = "TuneRefused: retries must be a whole number of at least 0, not -1\n"
    assert (ended.returncode, ended.stderr) == (1, sentence)


def test_a_tuning_that_its_rules_stop_ends_with_a_sentence(folder: Path) -> None:
    call = "train_dataset=[{}], algorithm=AlgorithmConfig('grpo', group_size=2, batch_size=1), retries=0"
    with serving(ServiceDouble()) as url:
        ended = run_as_program(folder, f"{call}, service={url!r}")
    assert (ended.returncode, ended.stderr.splitlines()[-1][:36]) == (1, "TuneFailed: step 1: 2 of 2 runs fail")
    assert "tune.py" not in ended.stderr


def test_settings_that_the_service_refuses_are_told_by_their_names(tmp_path: Path) -> None:
    config, log = tmp_path / "model.yaml", tmp_path / "model.log"
    refusing = f"print('{config}:1:7: trainer.seed: must be a whole number'); raise SystemExit(2)"
    process = ServiceProcess(config, log, command=[sys.executable, "-c", refusing])
    process._process.wait()
    with pytest.raises(TuneRefused, match=r"^the service refuses its settings: trainer\.seed: must be a whole number$"):
        process.check()


def test_the_stages_of_a_service_that_loads_are_said(tmp_path: Path) -> None:
    log = tmp_path / "model.log"
    line = "2026-11-30T02:00:00Z [info     ] engine_start_goes_on           engine=0 seconds=10 stage="
    program = f"print({line!r} + 'importing'); print({line!r} + repr('loading weights'))"
    process = ServiceProcess(tmp_path / "model.yaml", log, command=[sys.executable, "-c", program])
    process._process.wait()
    assert process.stage() == "loading weights"


def test_one_machine_only(tmp_path: Path) -> None:
    over = {"cluster": {"node_num": 4}}
    with pytest.raises(TuneRefused, match=r"cluster\.node_num: tune\(\) starts its services on one machine, not on 4"):
        service_settings(TunerChatModel(str(tmp_path)), Algorithm(), ServicePlace(), over=over)
