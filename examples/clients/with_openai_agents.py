"""OpenAI's Agents SDK with its chat model. A run has no reply ids, so feedback names its task and run."""

import os
import uuid

import httpx
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

tuneloop = os.environ.get("TUNELOOP_URL", "http://localhost:8010")
model = os.environ.get("TUNELOOP_MODEL", "tiny")

set_tracing_disabled(True)  # traces would go to OpenAI
run_id = uuid.uuid4().hex
agent = Agent(
    name="calculator",
    model=OpenAIChatCompletionsModel(model, AsyncOpenAI(base_url=f"{tuneloop}/v1", api_key="none")),
    model_settings=ModelSettings(metadata={"tuneloop_task_id": "task-1", "tuneloop_run_id": run_id}),
)
print(run_id, Runner.run_sync(agent, "3+4=").final_output)

feedback = {"task_id": "task-1", "run_id": run_id, "reward": 1.0}
print(httpx.post(f"{tuneloop}/feedback", json=feedback).json())
