"""The model that a workflow gets where AgentScope is installed: agents of 1.x and 2.x, each in its own environment."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tasks.warmup import build
from tests.clients.packages import PLACES, ROOT
from tests.doubles.engine import EngineDouble
from tests.explorer.running import RunningExplorer, eventually
from tests.trainer.factories import sample
from tuneloop.trainer.batches.batch import assemble

pytestmark = pytest.mark.contract

WORKFLOWS = Path(__file__).parent / "workflows"


def run_agents(package: str, url: str, *, runs: int, iterations: int) -> list[dict[str, Any]]:
    """Run agents in the package's environment; what each run says of itself."""
    python = PLACES / package / "bin" / "python"
    assert python.exists(), "run scripts/install-clients"
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment["PYTHONPATH"] = f"{ROOT / 'build' / 'links'}:{environment.get('PYTHONPATH', '')}"
    command = [str(python), str(WORKFLOWS / f"{package}.py"), url, str(runs), str(iterations)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("package", ["agentscope1", "agentscope2"])
def test_an_agents_calls_belong_to_its_run(explorer: RunningExplorer, double: EngineDouble, package: str) -> None:
    runs = run_agents(package, explorer.url, runs=10, iterations=3)
    eventually(lambda: len(explorer.exchanges()) == sum(len(each["ids"]) for each in runs))
    kept = {each.msg_id: each for each in explorer.exchanges()}
    for run in runs:
        assert len(run["ids"]) >= 3
        assert run["versions"] == [0]
        for msg_id in run["ids"]:
            assert (kept[msg_id].run_id, kept[msg_id].task_id) == (run["run_id"], f"task {int(run['run_id']) // 5}")
            assert f"Run {run['run_id']}." in kept[msg_id].request.decode()
    for chat in double.chats:
        assert (chat.body["temperature"], chat.body["top_p"]) == (0.5, 0.9)
        assert 50 in {chat.body.get("max_tokens"), chat.body.get("max_completion_tokens")}
        assert chat.body["chat_template_kwargs"] == {"enable_thinking": False}


def test_ten_calls_of_a_react_agent_are_one_sequence_and_its_summary_without_tools_another(
    explorer: RunningExplorer,
) -> None:
    [run] = run_agents("agentscope1", explorer.url, runs=1, iterations=10)
    assert len(run["ids"]) == 11
    eventually(lambda: len(explorer.exchanges()) == 11)
    words = build(0)[1]
    requests = [json.loads(each.request) for each in explorer.exchanges()]
    prompts = [words.apply_chat_template(_flat(each), tools=each.get("tools"), tokenize=False) for each in requests]
    began, ended = "<|im_start|>assistant\n", "<|im_end|>"
    said = prompts[1].removeprefix(prompts[0]).removeprefix(began).partition(ended)[0] + ended  # always the same
    calls = [_call(words, number, prompt + began, said) for number, prompt in enumerate(prompts, start=1)]
    sequences = assemble(calls, merge=True)
    assert sorted(len(each.calls) for each in sequences) == [1, 10]
    alone = sum(len(each.ids) for each in assemble(calls[:10], merge=False))
    merged = max(len(each.ids) for each in sequences)
    page = " ".join((ROOT / "docs" / "tune.md").read_text().split())
    assert f"{alone:,} tokens unmerged and {merged:,} merged." in page


def _flat(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages with text as text, as vLLM hands them to such a template."""
    return [
        message | {"content": "".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in request["messages"]
    ]


def _call(words: Any, number: int, prompt: str, reply: str) -> Any:
    ids = [np.array(words(text, add_special_tokens=False).input_ids, np.int32) for text in (prompt, reply)]
    logprobs = np.zeros(len(ids[1]), np.float32)
    return sample(number, prompt_ids=ids[0], completion_ids=ids[1], logprobs=logprobs, task_id="t", run_id="r")
