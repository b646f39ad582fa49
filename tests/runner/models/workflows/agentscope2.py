"""AgentScope 2.x: ten runs of an agent at once. Runs in the package's own environment."""

import asyncio
import json
import sys
from typing import Any

from agentscope.agent import Agent, ReActConfig
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit

from tuneloop.runner.models.bound_model import CallDefaults, make_model
from tuneloop.runner.models.run import Run


def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


async def attempt(url: str, number: int) -> dict[str, Any]:
    run = Run(service=url, task_id=f"task {number // 5}", run_id=str(number))
    defaults = CallDefaults(model_name="t", temperature=0.5, top_p=0.9, max_tokens=50, enable_thinking=False)
    model = make_model(run, defaults)
    assert isinstance(model, OpenAIChatModel)
    agent = Agent(
        "solver",
        f"Run {number}.",
        model,
        toolkit=Toolkit(tools=[FunctionTool(add)]),
        state=AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS)),
        react_config=ReActConfig(max_iters=3),
    )
    answer = await agent.reply(UserMsg(name="user", content="3+4="))
    versions = run.calls.model_versions
    return {"ids": run.calls.msg_ids, "text": answer.get_text_content(), "versions": versions, "run_id": run.run_id}


async def main() -> None:
    print(json.dumps(await asyncio.gather(*(attempt(sys.argv[1], number) for number in range(10)))))


asyncio.run(main())
