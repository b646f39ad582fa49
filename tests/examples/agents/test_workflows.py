"""The workflows of the examples against a teacher behind an OpenAI endpoint: what they ask, and what is judged."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from oracle import Oracle, serving, text_of

from examples.email_search.world import Mailbox, questions
from examples.json_format.world import Capitals
from examples.json_format.world import questions as questions_about_capitals
from examples.math_agent.world import Problems, problems
from examples.tasks.dialogue import Task
from examples.tasks.warmup import prompt_ids
from examples.worlds import model as models

ROOT = Path(__file__).parent.parent.parent.parent
DRIVER = Path(__file__).with_name("driver.py")

MATH, MAILS = problems(3, 3), questions(held_out=True)[:3]
CAPITALS = questions_about_capitals(held_out=True)[:3]


class Played(NamedTuple):
    """What a workflow was judged, and what it asked for."""

    verdicts: list[tuple[float, dict[str, float]]]
    asked: list[tuple[str, dict[str, Any]]]
    runs: set[str]


def play(world: Task, tasks: Sequence[dict[str, Any]], module: str, workflow: str, place: str | None = None) -> Played:
    """Run a workflow in the environment `place` below .venv/clients, or in this one."""
    python = ROOT / ".venv" / "clients" / place / "bin" / "python" if place else Path(sys.executable)
    if not python.exists():
        pytest.skip(f"{place} is not installed: run scripts/install-clients")
    oracle = Oracle(world, tasks)
    with serving(oracle) as url:
        ended = subprocess.run(
            [str(python), str(DRIVER), module, workflow, url],
            input=json.dumps(tasks),
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "build" / "links"), str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    verdicts = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    return Played(verdicts, oracle.asked, {run["task_id"] for run in oracle.runs})


def require_the_prompts_of(world: Task, tasks: Sequence[dict[str, Any]], asked: Sequence[tuple[str, Any]]) -> None:
    """The start model was taught what the workflow asks, token by token."""
    words, taught = models.tokenizer(world), []
    for task in tasks:
        dialogue = world.dialogue(task)
        messages = next(dialogue)
        for reply in world.replies(task, None):
            taught.append(prompt_ids(world, words, messages))
            try:
                messages = dialogue.send(reply)
            except StopIteration:
                break
    flat = [[{**each, "content": text_of(each) or None} for each in body["messages"]] for _, body in asked]
    assert [prompt_ids(world, words, messages) for messages in flat] == taught
    offered = [(tool["function"]["name"], list(tool["function"]["parameters"]["properties"])) for tool in world.tools]
    for _, body in asked:
        tools = [each["function"] for each in body.get("tools") or ()]
        assert [(each["name"], list(each["parameters"]["properties"])) for each in tools] == offered


@pytest.mark.parametrize(
    ("module", "workflow", "place"),
    [
        ("examples.math_agent.main", "with_agentscope", "agentscope1"),
        ("examples.math_agent.main", "with_agentscope", "agentscope2"),
        ("examples.math_agent.main", "with_openai", None),
        ("examples.langchain_agent.main", "solve", "langchain"),
    ],
)
def test_problems_are_solved_in_every_framework_by_the_same_prompts(
    module: str, workflow: str, place: str | None
) -> None:
    played = play(Problems(), MATH, module, workflow, place)
    assert [verdict["accuracy"] for _, verdict in played.verdicts] == [1.0] * len(MATH)
    assert [verdict["steps"] for _, verdict in played.verdicts] == [len(each["expressions"]) + 1 for each in MATH]
    require_the_prompts_of(Problems(), MATH, played.asked)
    assert played.runs == {"task-0", "task-1", "task-2"}


@pytest.mark.parametrize(
    ("module", "place"), [("examples.email_search.main", None), ("examples.openai_agents.main", "agents")]
)
def test_mails_are_searched_in_every_framework_by_the_same_prompts(module: str, place: str | None) -> None:
    played = play(Mailbox(), MAILS, module, "search_mails", place)
    assert [verdict["tools"] + verdict["arguments"] + verdict["recall"] for _, verdict in played.verdicts] == [3.0] * 3
    assert [reward for reward, _ in played.verdicts] == [2.5] * 3
    require_the_prompts_of(Mailbox(), MAILS, played.asked)
    assert played.runs == {"task-0", "task-1", "task-2"}


def test_capitals_are_asked_for_by_the_prompts_that_were_taught() -> None:
    played = play(Capitals(), CAPITALS, "examples.json_format.main", "answer")
    assert [reward for reward, _ in played.verdicts] == [1.0] * 3
    require_the_prompts_of(Capitals(), CAPITALS, played.asked)
