"""LiteLLM's responses. It makes its own ids, so feedback names the request's task and run."""

import os
import uuid

import httpx
import litellm

tuneloop = os.environ.get("TUNELOOP_URL", "http://localhost:8010")
model = os.environ.get("TUNELOOP_MODEL", "tiny")

run_id = uuid.uuid4().hex
reply = litellm.responses(
    model=f"openai/{model}",
    api_base=f"{tuneloop}/v1",
    api_key="none",
    input="3+4=",
    metadata={"tuneloop_task_id": "task-1", "tuneloop_run_id": run_id},
)
print(run_id, reply.output[0].content[0].text)

feedback = {"task_id": "task-1", "run_id": run_id, "reward": 1.0}
print(httpx.post(f"{tuneloop}/feedback", json=feedback).json())
