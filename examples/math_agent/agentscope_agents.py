"""AgentScope's own agents, 1.x and 2.x, with the calculator: `model` is an AgentScope chat model."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from examples.math_agent.world import CALCULATE, MOST_CALLS, PROMPT, calculate
from tuneloop.runner import WorkflowOutput


async def with_agentscope(task: Mapping[str, Any], model: Any) -> WorkflowOutput:
    """The installed version's agent."""
    is_new = find_spec("agentscope.credential") is not None
    return await (_with_version_2 if is_new else _with_version_1)(task, model)


async def _with_version_1(task: Mapping[str, Any], model: Any) -> WorkflowOutput:
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import Msg, TextBlock
    from agentscope.tool import Toolkit, ToolResponse

    def run_calculator(expression: str) -> ToolResponse:
        return ToolResponse(content=[TextBlock(type="text", text=calculate(expression))])

    toolkit = Toolkit()
    toolkit.register_tool_function(run_calculator, func_name="calculate", json_schema=CALCULATE)
    options = {"formatter": OpenAIChatFormatter(), "toolkit": toolkit, "max_iters": MOST_CALLS}
    agent = ReActAgent(name="solver", sys_prompt=PROMPT, model=model, **options)
    agent.set_console_output_enabled(False)
    reply = await agent.reply(Msg("user", task["question"], role="user"))
    said = [each for each in await agent.memory.get_memory() if each.role == "assistant"]
    return WorkflowOutput(response={"text": reply.get_text_content() or "", "turns": len(said)})


async def _with_version_2(task: Mapping[str, Any], model: Any) -> WorkflowOutput:
    from agentscope.agent import Agent, InjectionConfig, ReActConfig
    from agentscope.message import TextBlock, UserMsg
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool, ToolChunk, Toolkit

    def run_calculator(expression: str) -> ToolChunk:
        return ToolChunk(content=[TextBlock(text=calculate(expression))])

    function = CALCULATE["function"]
    tool = FunctionTool(
        run_calculator,
        name="calculate",
        description=function["description"],
        input_schema=function["parameters"],
        is_read_only=True,
        permission=PermissionDecision(behavior=PermissionBehavior.ALLOW, message="it only calculates"),
    )
    agent = Agent(
        name="solver",
        system_prompt=PROMPT,
        model=model,
        toolkit=Toolkit(tools=[tool]),
        react_config=ReActConfig(max_iters=MOST_CALLS),
        injection_config=InjectionConfig(inject_runtime_state=False),  # the time of day: no part of the problem
    )
    reply = await agent.reply(UserMsg(name="user", content=task["question"]))
    return WorkflowOutput(response={"text": reply.get_text_content() or "", "turns": _replies(agent)})


def _replies(agent: Any) -> int:
    """The number of the model's answers: one per tool call, and the last text."""
    blocks = [block for each in agent.state.context if each.role == "assistant" for block in each.content]
    return sum(block.type in ("tool_call", "text") for block in blocks)
