"""A ReAct agent on the stock `openai` client, without an agent framework."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from examples.tasks.dialogue import Message, Tool

#: What a tool does: its name and its arguments, None if they are no JSON object, become its answer.
RunTool = Callable[[str, Mapping[str, Any] | None], str]

#: Of one reply: a tiny model that has lost its way talks to the end.
MAX_TOKENS = 160


async def react(
    client: AsyncOpenAI,
    messages: Sequence[Message],
    *,
    model: str,
    tools: Sequence[Tool],
    run_tool: RunTool,
    most_calls: int,
) -> list[Message]:
    """Ask, run the tools that the model calls, and repeat until it calls none; the whole conversation."""
    said = list(messages)
    for _ in range(most_calls):
        completion = await client.chat.completions.create(
            model=model,
            messages=said,  # type: ignore[arg-type]
            tools=list(tools),  # type: ignore[arg-type]
            max_tokens=MAX_TOKENS,
        )
        reply = completion.choices[0].message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        said.append(reply)
        if not reply.get("tool_calls"):
            break
        for call in reply["tool_calls"]:
            function = call["function"]
            result = run_tool(function["name"], _arguments(function["arguments"]))
            said.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return said


def _arguments(written: str) -> Mapping[str, Any] | None:
    try:
        read = json.loads(written)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None
