"""Agents that are coroutines are run in one event loop, others in threads."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from openai import AsyncOpenAI

from tests.doubles.judge import judge_place
from tuneloop.runner import DataCollector, ToolUseEvaluator


def test_an_agent_keeps_its_connections_from_call_to_call() -> None:
    loops = []
    with judge_place() as model:
        model.says = ["On its way."]
        client = AsyncOpenAI(base_url=model.base_url, api_key="none", max_retries=0)

        async def agent(text: str) -> object:
            loops.append(asyncio.get_running_loop())
            return await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

        async def close(text: str) -> str:
            await client.close()
            return "closed"

        collector = DataCollector()
        for _ in range(3):
            assert collector.collect(agent, "Where is it?").messages[-1]["content"] == "On its way."
        report = ToolUseEvaluator().evaluate(agent, [{"input": "When?"}])
        assert DataCollector().collect(close, "").messages[-1]["content"] == "closed"
    assert report.failures == {}
    assert len(loops) == 4
    assert len(set(loops)) == 1


FORKED = """
import asyncio, os, sys
from tuneloop.runner import DataCollector

async def agent(text):
    async with asyncio.timeout(60):
        return await asyncio.to_thread(lambda: text)

def collect(text):
    print(DataCollector().collect(agent, text).messages[-1]["content"], flush=True)

collect("before")
child = os.fork()
if not child:
    collect("child")
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
for number in range(3):
    collect(f"after {number}")
"""


def test_a_forked_child_has_a_loop_of_its_own_and_leaves_its_parents_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout.split("\n"), done.stderr) == (["before", "child", "after 0", "after 1", "after 2", ""], "")


def test_agents_that_are_plain_functions_run_at_once() -> None:
    together = threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda at: DataCollector().collect(lambda text: str(together.wait(30)), str(at)), range(4)))
