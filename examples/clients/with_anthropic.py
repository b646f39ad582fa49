"""Anthropic's Python client."""

import os

from anthropic import Anthropic

tuneloop = os.environ.get("TUNELOOP_URL", "http://localhost:8010")
model = os.environ.get("TUNELOOP_MODEL", "tiny")

client = Anthropic(base_url=tuneloop, api_key="none")
reply = client.messages.create(
    model=model,
    max_tokens=12,
    messages=[{"role": "user", "content": "3+4="}],
    extra_body={"metadata": {"user_id": "ann", "task_id": "task-1", "run_id": "0"}},
)
print(reply.id, reply.content[0].text)

feedback = {"msg_ids": [reply.id], "reward": 1.0}
print(client.post("/feedback", body=feedback, cast_to=object))
