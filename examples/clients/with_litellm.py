"""LiteLLM as a library. It does not send `metadata`, so labels go into `extra_body`."""

import os

import httpx
import litellm

tuneloop = os.environ.get("TUNELOOP_URL", "http://localhost:8010")
model = os.environ.get("TUNELOOP_MODEL", "tiny")

reply = litellm.completion(
    model=f"openai/{model}",
    api_base=f"{tuneloop}/v1",
    api_key="none",
    messages=[{"role": "user", "content": "3+4="}],
    max_tokens=12,
    extra_body={"metadata": {"task_id": "task-1", "run_id": "0"}},
)
print(reply.id, reply.choices[0].message.content)

feedback = {"msg_ids": [reply.id], "reward": 1.0}
print(httpx.post(f"{tuneloop}/feedback", json=feedback).json())
