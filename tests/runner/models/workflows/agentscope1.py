"""AgentScope 1.x: runs of a ReAct agent at once, URL RUNS ITERATIONS. Runs in the package's own environment."""

import asyncio
import json
import sys
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse

from tuneloop.runner.models.bound_model import CallDefaults, make_model
from tuneloop.runner.models.run import Run


def add(a: int, b: int) -> ToolResponse:
    """Adds.

    Args:
        a (int): one
        b (int): another
    """
    return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])


async def attempt(url: str, number: int) -> dict[str, Any]:
    run = Run(service=url, task_id=f"task {number // 5}", run_id=str(number))
    defaults = CallDefaults(model_name="t", temperature=0.5, top_p=0.9, max_tokens=50, enable_thinking=False)
    model = make_model(run, defaults)
    assert isinstance(model, OpenAIChatModel)
    toolkit = Toolkit()
    toolkit.register_tool_function(add)
    agent = ReActAgent(
        "solver", f"Run {number}.", model, OpenAIChatFormatter(), toolkit=toolkit, max_iters=int(sys.argv[3])
    )
    agent.set_console_output_enabled(False)
    answer = await agent(Msg("user", "3+4=", "user"))
    versions = run.calls.model_versions
    return {"ids": run.calls.msg_ids, "text": answer.get_text_content(), "versions": versions, "run_id": run.run_id}


async def main() -> None:
    print(json.dumps(await asyncio.gather(*(attempt(sys.argv[1], number) for number in range(int(sys.argv[2]))))))


asyncio.run(main())
