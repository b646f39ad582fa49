"""A chain of look-ups: the agent looks up a place, is told the next one, and so on until it is told to end.

Whoever has learnt it makes `HOPS` calls of the tool and then answers: as many calls of the model, and one more.
`python lookups.py URL MODEL RUNS` runs agents one after another, of AgentScope where that is installed, and prints the
runs' names and how many calls each made.
"""

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from examples.tasks.dialogue import Dialogue, Message, Reply, Tool, Verdict, call_of
from tuneloop.runner.models.bound_model import CallDefaults, make_model
from tuneloop.runner.models.run import Run

PROMPT = "Follow the way from place to place. Then say where it ends."
#: Calls of the tool; AgentScope's agent makes its own.
HOPS = 9
MOST_CALLS = 14
_PLACES = (
    "Amber Basil Cedar Delta Ember Fjord Grove Haven Inlet Jetty Knoll Lagoon Manor North Oasis Pier Quarry Ridge "
    "Summit Tower Union Valley Wharf Yard"
)
PLACES = tuple(_PLACES.split())
LOOK_UP: Tool = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Says which place comes after a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "where you are"}},
            "required": ["place"],
        },
    },
}


class Way:
    """What the tool of one run knows."""

    def __init__(self, places: Sequence[str]) -> None:
        self.start, self._next = places[0], iter(places[1:])
        self.end = places[-1]

    def look_up(self, place: object = None) -> str:
        """The next place, whatever place was named: so a slip ends no run."""
        there = next(self._next, None)
        return "This is the end." if there is None else f"Go on to {there}."


def way_of(number: int) -> tuple[str, ...]:
    """The places of a numbered way."""
    return tuple(random.Random(f"way {number}").sample(PLACES, HOPS))


class LookUps:
    """The ways as a task for a model in this process."""

    name = "look_ups"
    tools: Sequence[Tool] = (LOOK_UP,)
    max_tokens = 48
    reward_range = (0.0, 1.0)

    def questions(self) -> Sequence[int]:
        """Those to be learnt from; what is measured has others."""
        return range(1_000_000, 1_004_000)

    def dialogue(self, question: int) -> Dialogue:
        """The agents' dialogue."""
        places = way_of(question)
        way = Way(places)
        messages: list[Message] = [
            {"role": "system", "content": PROMPT},
            {"role": "user", "content": f"You are at {way.start}."},
        ]
        for _ in range(MOST_CALLS):
            reply = yield list(messages)
            if not reply.calls:
                right = reply.text == f"It ends at {way.end}."
                return Verdict(float(right), right)
            messages += [reply.message, *(call.with_result(way.look_up()) for call in reply.calls)]
        return Verdict(0.0, False)

    def replies(self, question: int, slip: random.Random | None) -> Iterator[Reply]:
        """Each look-up, then the answer."""
        places = way_of(question)
        yield from (call_of("look_up", place=place) for place in places)
        yield Reply(f"It ends at {places[-1]}.")


async def follow(model: Any, number: int) -> None:
    """One run with the installed agent framework."""
    way = Way(way_of(number))
    if find_spec("agentscope") is None:
        await _with_openai(model, way)
    elif find_spec("agentscope.credential") is None:
        await _with_agentscope_1(model, way)
    else:
        await _with_agentscope_2(model, way)


async def _with_openai(model: Any, way: Way) -> None:
    from examples.worlds.react import react

    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": f"You are at {way.start}."}]

    def run_tool(name: str, arguments: Mapping[str, Any] | None) -> str:
        return way.look_up()

    await react(model, messages, model=model.model_name, tools=[LOOK_UP], run_tool=run_tool, most_calls=MOST_CALLS)


async def _with_agentscope_1(model: Any, way: Way) -> None:
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import Msg, TextBlock
    from agentscope.tool import Toolkit, ToolResponse

    def look_up(place: str) -> ToolResponse:
        return ToolResponse(content=[TextBlock(type="text", text=way.look_up(place))])

    toolkit = Toolkit()
    toolkit.register_tool_function(look_up, json_schema=LOOK_UP)
    options = {"formatter": OpenAIChatFormatter(), "toolkit": toolkit, "max_iters": MOST_CALLS}
    agent = ReActAgent(name="walker", sys_prompt=PROMPT, model=model, **options)
    agent.set_console_output_enabled(False)
    await agent.reply(Msg("user", f"You are at {way.start}.", role="user"))


async def _with_agentscope_2(model: Any, way: Way) -> None:
    from agentscope.agent import Agent, InjectionConfig, ReActConfig
    from agentscope.message import TextBlock, UserMsg
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool, ToolChunk, Toolkit

    def look_up(place: str) -> ToolChunk:
        return ToolChunk(content=[TextBlock(text=way.look_up(place))])

    function = LOOK_UP["function"]
    tool = FunctionTool(
        look_up,
        name="look_up",
        description=function["description"],
        input_schema=function["parameters"],
        is_read_only=True,
        permission=PermissionDecision(behavior=PermissionBehavior.ALLOW, message="it only reads"),
    )
    agent = Agent(
        name="walker",
        system_prompt=PROMPT,
        model=model,
        toolkit=Toolkit(tools=[tool]),
        react_config=ReActConfig(max_iters=MOST_CALLS),
        injection_config=InjectionConfig(inject_runtime_state=False),
    )
    await agent.reply(UserMsg(name="user", content=f"You are at {way.start}."))


async def _run_agents(url: str, model_name: str, runs: int) -> list[dict[str, Any]]:
    found = []
    for number in range(runs):
        run = Run(service=url, task_id=f"way {sys.prefix}", run_id=str(number))
        await follow(make_model(run, CallDefaults(model_name=model_name, temperature=1.0, max_tokens=64)), number)
        found.append({"task_id": run.task_id, "run_id": run.run_id, "calls": len(run.calls)})
    return found


if __name__ == "__main__":
    service, name, count = sys.argv[1:]
    print(json.dumps(asyncio.run(_run_agents(service, name, int(count)))))
