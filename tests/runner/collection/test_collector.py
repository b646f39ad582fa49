"""Runs as records, collected while they happen and read back from the ledger."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.judge import judge_place
from tests.install.wheels import ROOT
from tuneloop.runner import DataCollector, RunRecord, reward_function
from tuneloop.runner.collection.run_records import write_records

CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "invoice"}'}}
RUN: list[dict[str, Any]] = [
    {"role": "user", "content": "Find the invoice."},
    {"role": "assistant", "content": "I need a tool.", "tool_calls": [CALL]},
    {"role": "tool", "content": "1 mail", "tool_call_id": "c1"},
    {"role": "assistant", "content": "<think>Done.</think>Here it is."},
]


def test_a_run_is_one_record() -> None:
    collector = DataCollector()
    with collector.run("conv_001", task_id="t", run_id="r") as run:
        run.add(*RUN)
        run.feedback(rating=4, comment="right")
        for name, value in (("task_completion", 0.8), ("efficiency", 0.6), ("user_satisfaction", 0.8)):
            run.reward(name, value)
    [record] = collector.records
    row = record.to_dict()
    assert {name: row[name] for name in ("conversation_id", "thoughts", "tool_calls", "rewards", "user_feedback")} == {
        "conversation_id": "conv_001",
        "thoughts": [{"step": 1, "content": "I need a tool."}, {"step": 2, "content": "Done."}],
        "tool_calls": [{"tool": "search", "args": {"q": "invoice"}, "result": "1 mail"}],
        "rewards": {"task_completion": 0.8, "efficiency": 0.6, "user_satisfaction": 0.8},
        "user_feedback": {"rating": 4, "comment": "right"},
    }
    assert row["total_reward"] == pytest.approx(2.2)
    assert (row["messages"], row["task_id"], row["run_id"]) == (RUN, "t", "r")


def test_an_agent_is_run_and_recorded() -> None:
    collector = DataCollector()
    record = collector.collect(lambda text: f"You said {text}", "hello", user_feedback={"rating": 4})
    assert [each["content"] for each in record.messages] == ["hello", "You said hello"]
    assert record.user_feedback == {"rating": 4}

    async def agent(text: str) -> list[dict[str, Any]]:
        return RUN

    assert collector.collect(agent, "Find the invoice.", rewards={"right": 1.0}).to_dict()["messages"] == RUN
    assert [each.total_reward for each in collector.records] == [None, 1.0]


def test_fields_may_be_left_out() -> None:
    collector = DataCollector({"messages": False, "user_feedback": False, "rewards": True})
    with collector.run("c") as run:
        run.add(*RUN)
        run.feedback(comment="secret")
    row = collector.records[0].to_dict()
    assert (row["messages"], row["user_feedback"], len(row["tool_calls"])) == ([], {}, 1)
    with pytest.raises(ValueError, match="collect_fields: mesages is none of"):
        DataCollector({"mesages": True})


def test_results_find_their_calls() -> None:
    calls = [{**CALL, "id": name} for name in ("a", "b", "c")]
    back = [{"role": "tool", "content": name, "tool_call_id": name} for name in ("b", "a")]
    said = [{"role": "assistant", "content": "", "tool_calls": calls}, *back]
    assert [each["result"] for each in RunRecord.of_messages("c", said).tool_calls] == ["a", "b", None]
    nameless = [{"role": "assistant", "content": "", "tool_calls": [{"function": CALL["function"]}] * 2}]
    told = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert [each["result"] for each in RunRecord.of_messages("c", nameless + told).tool_calls] == ["1", "2"]


def test_records_are_rewarded_by_components() -> None:
    record = RunRecord.of_messages("c", RUN, tools=("search",))
    score = reward_function({"tool_success": 1.0, "invalid_tool": -2.0, "steps_penalty": -0.1})(record.as_reply())
    assert score.total == pytest.approx(0.8)
    with pytest.raises(ValueError, match="reward a"):
        RunRecord.of_messages("c", RUN, rewards={"a": float("nan")})


AGENT = """
import asyncio, json, sys
from agentscope.agent import *
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit
from tuneloop.runner import DataCollector
model = OpenAIChatModel("m", api_key="none", stream=False, client_kwargs={"base_url": sys.argv[1]})
agent = ReActAgent("helper", "Help.", model, OpenAIChatFormatter(), toolkit=Toolkit(), memory=InMemoryMemory())
agent.set_console_output_enabled(False)
collector = DataCollector()
for text in ("Where is my parcel?", "When?"):
    collector.collect(agent, text, user_feedback={"rating": 4})
print(json.dumps([each.to_dict() for each in collector.records]))
"""


def test_an_agent_of_agentscope_is_read_from_its_memory() -> None:
    python = ROOT / ".venv" / "clients" / "agentscope1" / "bin" / "python"
    if not python.exists():
        pytest.skip("agentscope1 is not installed: scripts/install-clients")
    with judge_place() as model:
        model.says = ["On its way.", "On Monday."]
        environment = {"PYTHONPATH": str(ROOT / "build" / "links"), "HOME": str(Path.home())}
        command = [python, "-W", "ignore", "-c", AGENT, model.base_url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.strip().splitlines()[-1])
    assert [(each["role"], each["content"]) for each in first["messages"]] == [
        ("user", "Where is my parcel?"),
        ("assistant", "On its way."),
    ]
    assert [each["content"] for each in second["messages"]] == ["When?", "On Monday."]


# Read back.


def test_a_file_of_records_is_its_owners_and_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    assert write_records(file, [RunRecord(conversation_id="a")]) == 1
    assert file.stat().st_mode & 0o077 == 0
    with open(file, "a") as cut:
        cut.write('{"conversation_id": "cut')
    assert write_records(file, [RunRecord(conversation_id="b"), RunRecord(conversation_id="c")]) == 2
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    assert [row["conversation_id"] for row in rows] == ["a", "b", "c"]
