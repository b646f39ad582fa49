"""The agent of the tasks: plays them with the stock OpenAI client, and gives feedback on each run."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any, Literal, NamedTuple

from examples.sums.drive import POLL_S, Client, Pace, together
from examples.tasks.dialogue import Call, Message, Reply, Task, Tool, Verdict, forever, text_of
from examples.tasks.rating import Rater
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger

#: `strict`: the engine holds calls to the tools' schemas; `required`: and every reply to be a call.
HeldTools = Literal["plain", "strict", "required"]


class Turn(NamedTuple):
    """One run of a question: the task's name in the labels, and the run's number in it."""

    question: Any
    task_id: str
    run_id: str


class Agent(Client):
    """One client of the explorer at `url`. It plays each question `runs` times, and at most `most` runs in all.

    `demonstrate`: say beside the reward what the last reply should have been. `held` is how the engine holds calls
    to a grammar. `judged` are the verdicts so far.
    """

    def __init__(self, url: str, task: Task, rater: Rater, *, runs: int, most: int, demonstrate: bool = False) -> None:
        super().__init__(url)
        self.held: HeldTools = "plain"
        self.judged: list[Verdict] = []
        self._task, self._rater, self._runs, self._most, self._demonstrate = task, rater, runs, most, demonstrate

    async def measure(self, questions: int, *, seed: int) -> float:
        """The share of runs that end right, without giving any feedback."""
        waiting, right = islice(forever(self._task, seed), questions), 0

        async def work() -> None:
            nonlocal right
            for each in waiting:
                async with self.requests.count():
                    _, verdict = await self._play(each, {"train": "false"})
                    right += verdict.right

        await together(work)
        return right / questions

    async def drive(self, ledger: Ledger, *, seed: int, until_step: int, ahead: int) -> None:
        """Play and give feedback until the trainer has made `until_step` steps, or `most` runs have been played.

        At most `ahead` replies wait for the trainer at any time, so that it learns from fresh ones.
        """
        pace, chance = Pace(ahead), random.Random(f"rewards {seed}")  # not those by which the questions are drawn
        turns = islice(turns_of(self._task, seed, self._runs), self._most)

        async def work() -> None:
            for turn in turns:
                if not await pace.go():
                    return
                try:
                    await self._turn(turn, chance)
                finally:
                    pace.end_question()

        async with asyncio.TaskGroup() as group:
            leading = group.create_task(self._lead(ledger, pace, until_step=until_step))
            await together(work)
            leading.cancel()
        while (await asyncio.to_thread(ledger.reports.counts))[State.REWARDED]:
            await self._commit()
            await asyncio.sleep(POLL_S)

    async def _turn(self, turn: Turn, chance: random.Random) -> None:
        async with self.requests.count():
            labels = {"task_id": turn.task_id, "run_id": turn.run_id}
            msg_ids, verdict = await self._play(turn.question, labels)
            self.judged.append(verdict)
            said: dict[str, Any] = {"msg_ids": msg_ids, "reward": self._rater.reward(verdict, chance), **labels}
            if self._demonstrate:
                *_, said["demonstration"] = map(text_of, self._task.replies(turn.question, None))
            async with self.requests.count():
                await self._post("/feedback", said)

    async def _play(self, question: Any, labels: dict[str, str]) -> tuple[list[str], Verdict]:
        """The ids of the run's replies, and its verdict."""
        dialogue, msg_ids = self._task.dialogue(question), list[str]()
        messages = next(dialogue)
        while True:
            msg_id, reply = await self._ask(messages, labels)
            msg_ids.append(msg_id)
            try:
                messages = dialogue.send(reply)
            except StopIteration as end:
                return msg_ids, end.value

    async def _ask(self, messages: list[Message], labels: dict[str, str]) -> tuple[str, Reply]:
        reply = await self._chat.chat.completions.create(
            model=self._task.name,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=self._task.max_tokens,
            temperature=1.0,
            metadata=labels,
            **offer(self._task.tools, self.held),
        )
        said = reply.choices[0].message
        calls = [
            Call(each.id, each.function.name, each.function.arguments)
            for each in said.tool_calls or ()
            if each.type == "function"
        ]
        return reply.id, Reply(said.content or "", tuple(calls))


def offer(tools: Sequence[Tool], held: HeldTools) -> dict[str, Any]:
    """A request's tools, in agent frameworks' form."""
    if not tools:
        return {}
    if held == "plain":
        return {"tools": list(tools)}
    strict = [_strict(tool) for tool in tools]
    return {"tools": strict} | ({"tool_choice": "required"} if held == "required" else {})


def _strict(tool: Tool) -> dict[str, Any]:
    function = tool["function"]
    parameters = {**function["parameters"], "additionalProperties": False}
    return {**tool, "function": {**function, "parameters": parameters, "strict": True}}


def turns_of(task: Task, seed: int, runs: int) -> Iterator[Turn]:
    """Endless turns: each question `runs` times in a row as one task; a repeated question is another task."""
    for number, question in zip(count(), forever(task, seed), strict=False):
        for run in range(runs):
            yield Turn(question, f"{task.name}-{seed}-{number}", str(run))
