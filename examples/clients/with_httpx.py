"""httpx, or any other HTTP client."""

import os

import httpx

tuneloop = os.environ.get("TUNELOOP_URL", "http://localhost:8010")
model = os.environ.get("TUNELOOP_MODEL", "tiny")

request = {
    "model": model,
    "messages": [{"role": "user", "content": "3+4="}],
    "max_tokens": 12,
    "metadata": {"task_id": "task-1", "run_id": "0"},
}
reply = httpx.post(f"{tuneloop}/v1/chat/completions", json=request, timeout=600).json()
print(reply["id"], reply["choices"][0]["message"]["content"])

feedback = {"msg_ids": [reply["id"]], "reward": 1.0}
print(httpx.post(f"{tuneloop}/feedback", json=feedback).json())
