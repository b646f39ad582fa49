"""A user's app: it asks, judges the answers, says what it thinks of them, and keeps its own book."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from tests.loop.harness.services import commit

#: The clients' own 5 s to connect are too few where they share two cores with engines and trainer.
PATIENCE = openai.Timeout(600, connect=60)


def letters(text: str) -> float:
    """The share of ASCII letters: a reward that a random model can raise in a few steps."""
    return sum(each.isascii() and each.isalpha() for each in text) / max(1, len(text))


@dataclass
class Agent:
    """Asks `lanes` questions at once, every second one as a stream; `asked` is what each request says besides."""

    url: str
    model: str
    judge: Callable[[str], float] = letters
    lanes: int = 16
    asked: dict[str, Any] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    acknowledged: dict[str, float] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)

    def work(self, questions: int) -> None:
        """Ask that many questions, with feedback for each and a commit after each round of lanes."""
        asyncio.run(self._work(questions))

    async def _work(self, questions: int) -> None:
        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        async with client, httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            for first in range(0, questions, self.lanes):
                await asyncio.gather(*(self._one(client, http, first + lane) for lane in range(self.lanes)))
                await asyncio.to_thread(commit, self.url)

    async def _one(self, client: openai.AsyncOpenAI, http: httpx.AsyncClient, number: int) -> None:
        try:
            msg_id, text = await self._ask(client, number)
            reward = self.judge(text)
            body = {"msg_ids": [msg_id], "reward": reward, "task_id": f"task-{number % 4}", "run_id": number}
            (await http.post("/feedback", json=body)).raise_for_status()
        except (openai.OpenAIError, httpx.HTTPError) as error:
            error.add_note(f"because of {error.__cause__!r}")
            self.failures.append(error)
        else:
            self.rewards.append(reward)
            self.acknowledged[msg_id] = reward

    async def _ask(self, client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        messages = [{"role": "user", "content": f"question {number % 10}"}]
        asked = {"model": self.model, "messages": messages, **self.asked}
        if number % 2:
            reply = await client.chat.completions.create(**asked)
            return reply.id, reply.choices[0].message.content or ""
        text = ""
        async for piece in await client.chat.completions.create(**asked, stream=True):
            text += piece.choices[0].delta.content or ""
        return piece.id, text
