"""The agent: asks sums with the stock OpenAI client, judges the replies and sends feedback.

It never stops for a new version: weights may change between two requests, or during one.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, Self

import httpx
from openai import AsyncOpenAI, OpenAIError

from examples.sums.task import Sum, forever, judge
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger

AT_ONCE = 32
MAX_TOKENS = 8
POLL_S = 0.1
_RUN_ID = "demo"

Reward = Callable[[Sum, str], float]


def reward_by(name: str, seed: int) -> Reward:
    """`judge` rewards the right answer; `random` tosses a coin, so that nothing can be learnt."""
    coin = random.Random(f"coin {seed}")  # not the seed alone, in whose order the sums are asked
    return judge if name == "judge" else lambda _asked, _reply: float(coin.random() < 0.5)


@dataclass(slots=True)
class Requests:
    """Counts requests and failures, with the last failure; `put_off` counts commits that the ledger's delay refused."""

    made: int = 0
    failed: int = 0
    put_off: int = 0
    last_failure: str = ""

    @asynccontextmanager
    async def count(self) -> AsyncIterator[None]:
        """Count one request and suppress its failure."""
        self.made += 1
        try:
            yield
        except (OpenAIError, httpx.HTTPError) as error:
            self.failed += 1
            self.last_failure = f"{type(error).__name__}: {error}"


class Client:
    """A client of the explorer at `url` that counts its requests; without a `key` it must be local."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.requests = Requests()
        # retries would hide failures
        self._chat = AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, timeout=60.0)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._chat.close()
        await self._http.aclose()

    async def _lead(self, ledger: Ledger, pace: "Pace", *, until_step: int) -> None:
        """Commit rewarded replies and admit the next questions, until the trainer has made so many steps."""
        while (await asyncio.to_thread(ledger.versions.newest)).step < until_step:
            counts = await asyncio.to_thread(ledger.reports.counts)
            if counts[State.REWARDED]:
                await self._commit()
            pace.waiting(counts[State.REWARDED] + counts[State.COMMITTED] + counts[State.LEASED])
            await asyncio.sleep(POLL_S)
        pace.stop()

    async def _commit(self) -> None:
        async with self.requests.count():
            try:
                await self._post("/commit", {})
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    raise
                self.requests.put_off += 1
                await asyncio.sleep(float(error.response.headers["retry-after"]))

    async def _post(self, path: str, body: dict[str, object]) -> None:
        answer = await self._http.post(path, json=body)
        if not answer.is_success:
            raise httpx.HTTPStatusError(
                f"{path}: {answer.status_code} {answer.text}", request=answer.request, response=answer
            )


class Agent(Client):
    """The demo's agent."""

    def __init__(self, url: str, *, model: str, reward: Reward, key: str | None = None) -> None:
        super().__init__(url, key)
        self._reward = reward
        self._model = model

    async def measure(self, questions: int, *, seed: int) -> float:
        """The share of right answers, without giving any feedback."""
        asked = list(islice(forever(seed), questions))
        waiting, right = iter(asked), 0.0

        async def work() -> None:
            nonlocal right
            for each in waiting:
                async with self.requests.count():
                    _, text = await self._ask(each, whole=True, metadata={"train": "false"})
                    right += judge(each, text)

        await together(work)
        return right / questions

    async def drive(self, ledger: Ledger, *, seed: int, until_step: int, ahead: int) -> None:
        """Ask, judge and give feedback until the trainer has made `until_step` steps.

        At most `ahead` replies wait for the trainer at any time, so that it learns from fresh ones.
        """
        pace, questions = Pace(ahead), forever(seed)

        async def work() -> None:
            for number, asked in enumerate(questions):
                if not await pace.go():
                    return
                try:
                    await self._turn(asked, whole=number % 2 == 0)
                finally:
                    pace.end_question()

        async with asyncio.TaskGroup() as group:
            group.create_task(self._lead(ledger, pace, until_step=until_step))
            group.create_task(together(work))

    async def _turn(self, asked: Sum, *, whole: bool) -> None:
        async with self.requests.count():
            task_id = asked.question
            msg_id, text = await self._ask(asked, whole=whole, metadata={"task_id": task_id, "run_id": _RUN_ID})
            async with self.requests.count():
                body = {"reward": self._reward(asked, text), "msg_ids": [msg_id], "task_id": task_id, "run_id": _RUN_ID}
                await self._post("/feedback", body)

    async def _ask(self, asked: Sum, *, whole: bool, metadata: dict[str, str]) -> tuple[str, str]:
        """The reply's id and text."""
        create = self._chat.chat.completions.create
        question: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": asked.question}],
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "metadata": metadata,
        }
        if whole:
            reply = await create(**question)
            return reply.id, reply.choices[0].message.content or ""
        msg_id, pieces = "", []
        async for chunk in await create(**question, stream=True):
            msg_id = chunk.id
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        return msg_id, "".join(pieces)


class Pace:
    """Admits questions only while few replies wait for the trainer."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._free = ahead
        self._in_flight = 0
        self._stopped = False
        self._changed = asyncio.Event()

    async def go(self) -> bool:
        """Wait for a place; False at the end."""
        while not self._stopped and self._free <= 0:
            self._changed.clear()
            await self._changed.wait()
        self._free -= 1
        self._in_flight += 1
        return not self._stopped

    def end_question(self) -> None:
        """A question is no longer in flight; its room comes back once the trainer has used it."""
        self._in_flight -= 1

    def waiting(self, replies: int) -> None:
        """Say how many replies wait for the trainer now."""
        self._free = self._ahead - replies - self._in_flight
        self._changed.set()

    def stop(self) -> None:
        """Let nothing more through."""
        self._stopped = True
        self._changed.set()


async def together(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do the same work AT_ONCE times at once."""
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
