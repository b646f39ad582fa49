"""Agents that are coroutines are run in one event loop of their thread."""

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


def test_each_thread_has_its_own_loop_which_is_closed_after_it() -> None:
    loops: dict[int, set[asyncio.AbstractEventLoop]] = {}
    together = threading.Barrier(4)

    async def agent(text: str) -> str:
        loops.setdefault(threading.get_ident(), set()).add(asyncio.get_running_loop())
        await asyncio.to_thread(together.wait)  # all of them run at once
        return text

    collector = DataCollector()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda at: [collector.collect(agent, str(at)) for _ in range(3)], range(4)))
    assert [len(each) for each in loops.values()] == [1] * 4
    assert len(set.union(*loops.values())) == 4
    assert len(collector.records) == 12
    later = threading.Thread(target=lambda: DataCollector().collect(lambda text: text, "hello"))
    later.start()
    later.join()
    assert all(loop.is_closed() for each in loops.values() for loop in each)


def run(script: str) -> str:
    """What it prints; it must not complain of anything."""
    command = [sys.executable, "-W", "always::ResourceWarning", "-W", "always::RuntimeWarning", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


AT_EXIT = """
import asyncio
from tuneloop.runner import DataCollector

async def wait():
    try:
        await asyncio.sleep(3600)
    finally:
        print("ended")

tasks = []

async def agent(text):
    await asyncio.to_thread(int)
    tasks.append(asyncio.create_task(wait()))
    await asyncio.sleep(0)
    return text

DataCollector().collect(agent, "hello")
print("last line")
"""


def test_loops_are_closed_when_the_interpreter_ends() -> None:
    assert run(AT_EXIT) == "last line\nended\n"


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
    assert run(FORKED).split("\n") == ["before", "child", "after 0", "after 1", "after 2", ""]
