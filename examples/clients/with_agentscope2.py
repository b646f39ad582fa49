"""AgentScope 2.x."""

import asyncio
import os

import httpx
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel

tuneloop = os.environ.get("TUNELOOP_URL", "http://localhost:8010")
model = os.environ.get("TUNELOOP_MODEL", "tiny")


async def ask() -> str:
    """Ask, and return the reply's id."""
    chat = OpenAIChatModel(
        credential=OpenAICredential(api_key="none", base_url=f"{tuneloop}/v1"),
        model=model,
        parameters=OpenAIChatModel.Parameters(max_tokens=12),
        stream=False,
        extra_body={"metadata": {"task_id": "task-1", "run_id": "0"}},
    )
    reply = await chat([UserMsg(name="user", content="3+4=")])
    print(reply.id, reply.content[0].text)
    return reply.id


feedback = {"msg_ids": [asyncio.run(ask())], "reward": 1.0}
print(httpx.post(f"{tuneloop}/feedback", json=feedback).json())
