"""The examples of rewards, judges and runs run as they stand, and the tables for movers name what there is."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import tuneloop.runner
from tests.doubles.judge import judge_place, verdict
from tests.house.documents.page_files import DOCS, part_below, python_of
from tuneloop.runner.tuning import config_file

MOVING = (DOCS / "limits.md").read_text()


def test_the_rewards_are_what_the_page_says() -> None:
    names: dict[str, Any] = {}
    for block in python_of("giving_feedback.md", "Rewards from code"):
        exec(block, names)  # noqa: S102 - our own page
    assert names["body"]["feedback"][0]["value"] == 3.3


def test_the_judge_is_used_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rubric = {"criteria": [{"name": "helpful", "description": "Does it help?", "weight": 1}]}
    names: dict[str, Any] = {}
    with judge_place() as double:
        two = verdict(5, 4, names="relevance accuracy")
        double.says = [verdict(5, 3, 1), two, rubric]
        for block in python_of("giving_feedback.md", "Judges"):
            exec(block.replace("http://localhost:8000", double.url), names)  # noqa: S102
        names["judge"].close()
    assert names["verdict"].total == 3.0
    assert names["evaluation"] == {"relevance": 5.0, "accuracy": 4.0, "total": 4.5}
    assert dict(names["strict"].criteria) == {"helpful": "Does it help?"}


def test_a_run_and_its_model_are_what_the_page_says() -> None:
    names: dict[str, Any] = {}
    for block in python_of("tune.md", "Runs"):
        exec(block, names)  # noqa: S102 - our own page
    assert names["run"].calls.msg_ids == []


def test_every_name_of_agentscope_rl_is_told_what_it_is_here() -> None:
    theirs = (
        "OnlineTrainer RLRuntime DataCollector HotUpdater ModelManager ABTestFramework MathAgentTrainer ToolUseTrainer "
        "ToolUseEvaluator MultiAgentGame GameTrainer RewardFunction LLMJudge HumanPreferenceCollector DPOTrainer"
    )
    rows = part_below(MOVING, "Names of `agentscope.rl`").splitlines()
    rows = [row for row in rows if row.startswith("|`")][1:]
    assert [name for name in theirs.split() if not any(f"`{name}" in row.split("|")[1] for row in rows)] == []
    ours = re.findall(r"`([A-Z]\w+|reward_function)`", " ".join(row.split("|")[2] for row in rows if row))
    assert len(ours) >= 10
    assert set(ours) <= set(tuneloop.runner.__all__)


def test_every_name_of_agentscopes_tuner_is_told_what_it_is_here() -> None:
    theirs = (
        "tune AlgorithmConfig WorkflowType WorkflowOutput JudgeType JudgeOutput DatasetConfig TunerModelConfig "
        "TinkerConfig check_workflow_function check_judge_function tune_prompt PromptTuneConfig select_model"
    )
    assert [name for name in theirs.split() if f"`{name}" not in MOVING] == []
    ours = set(theirs.split()) - {"tune_prompt", "PromptTuneConfig", "select_model"}
    assert ours <= set(tuneloop.runner.__all__)


def test_every_key_of_trinitys_that_tune_reads_is_told() -> None:
    source = inspect.getsource(config_file)
    calls = re.findall(r"_take(?:_first)?\(([^)]*)\)", source)
    read = {key for call in calls for key in re.findall(r'"([\w.]+)"', call)}
    page = part_below(MOVING, "Keys of Trinity's YAML")
    told: set[str] = set()
    for row in re.findall(r"^\|(`.*?)\|", page, re.MULTILINE):
        first, *others = re.findall(r"`([\w.]+)`", row) or [""]
        within = [first.rsplit(".", at)[0] for at in range(1, first.count(".") + 1)]
        told |= {first, *within, *others, *(f"{each}{other}" for each in within for other in others)}
    assert read - told == set()
    assert len(read) > 20
