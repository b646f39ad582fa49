"""openai-python's asynchronous client, streaming."""

import asyncio
import os

from openai import AsyncOpenAI

tuneloop = os.environ.get("TUNELOOP_URL", "http://localhost:8010")
model = os.environ.get("TUNELOOP_MODEL", "tiny")


async def main() -> None:
    """Ask, and rate the reply."""
    async with AsyncOpenAI(base_url=f"{tuneloop}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "3+4="}],
            max_tokens=12,
            metadata={"task_id": "task-1", "run_id": "0"},
            stream=True,
        )
        async for chunk in stream:
            print(chunk.choices[0].delta.content, end="")
        print(chunk.id)  # the same in every chunk

        feedback = {"msg_ids": [chunk.id], "reward": 1.0}
        print(await client.post(f"{tuneloop}/feedback", body=feedback, cast_to=object))


asyncio.run(main())
