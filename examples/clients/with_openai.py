"""openai-python, 1.x to 3.x."""

import os

from openai import OpenAI

tuneloop = os.environ.get("TUNELOOP_URL", "http://localhost:8010")
model = os.environ.get("TUNELOOP_MODEL", "tiny")

client = OpenAI(base_url=f"{tuneloop}/v1", api_key="none")
reply = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "3+4="}],
    max_tokens=12,
    metadata={"task_id": "task-1", "run_id": "0"},
)
print(reply.id, reply.choices[0].message.content)

feedback = {"msg_ids": [reply.id], "reward": 1.0}
print(client.post(f"{tuneloop}/feedback", body=feedback, cast_to=object))
