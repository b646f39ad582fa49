"""LangChain's ChatOpenAI."""

import os

import httpx
from langchain_openai import ChatOpenAI

tuneloop = os.environ.get("TUNELOOP_URL", "http://localhost:8010")
model = os.environ.get("TUNELOOP_MODEL", "tiny")

chat = ChatOpenAI(
    base_url=f"{tuneloop}/v1",
    api_key="none",
    model=model,
    max_tokens=12,
    extra_body={"metadata": {"task_id": "task-1", "run_id": "0"}},
)
reply = chat.invoke("3+4=")
msg_id = reply.response_metadata["id"]
print(msg_id, reply.content)

feedback = {"msg_ids": [msg_id], "reward": 1.0}
print(httpx.post(f"{tuneloop}/feedback", json=feedback).json())
