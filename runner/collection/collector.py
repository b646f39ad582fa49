"""Collects runs as records while they happen."""

import inspect
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuneloop.runner.collection.run_record import RECORD_FIELDS, RunRecord, write_records
from tuneloop.runner.collection.thread_loops import run_in_thread_loop
from tuneloop.runner.rewards.chat_messages import ChatMessage, chat_messages, plain_object

#: An agent: takes what the user said, and returns a text, a message, a completion, or all messages of the run.
AgentLike = Callable[[Any], Any]


class RunCollection:
    """A run that is being collected."""

    def __init__(self, conversation_id: str, **labels: str | None) -> None:
        self.conversation_id = conversation_id
        self._labels = labels
        self._messages: list[ChatMessage] = []
        self._rewards: dict[str, float] = {}
        self._feedback: dict[str, Any] = {}
        self._reply_ids: list[str] = []

    def add(self, *messages: object) -> None:
        """Messages or completions of any client, in their order. Of a completion the id is kept, for feedback."""
        for each in messages:
            self._messages += chat_messages(each)
            if not isinstance(each, str | list | tuple):
                plain = plain_object(each)
                if plain.get("choices") and plain.get("id"):
                    self._reply_ids.append(str(plain["id"]))

    def reward(self, name: str, value: float) -> None:
        """What it earned, under a name; a later value takes the place of an earlier one."""
        self._rewards[name] = float(value)

    def feedback(self, **labels: Any) -> None:
        """What a user said of it, such as rating=4, comment="right"."""
        self._feedback |= labels

    def record(self) -> RunRecord:
        """The record of what was collected until now."""
        return RunRecord.of_messages(
            self.conversation_id,
            self._messages,
            rewards=dict(self._rewards),
            user_feedback=dict(self._feedback),
            reply_ids=tuple(self._reply_ids),
            **self._labels,
        )


class DataCollector:
    """Collects the runs of an agent. `collect_fields` says which parts are kept: all that it does not name are.

    >>> collector = DataCollector()
    >>> with collector.run("conv_001") as run:
    ...     run.add({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"})
    ...     run.reward("task_completion", 0.8)
    >>> collector.records[0].total_reward
    0.8
    """

    def __init__(self, collect_fields: Mapping[str, bool] | None = None) -> None:
        """Raises ValueError for a field that records do not have."""
        wanted = dict(collect_fields or {})
        if unknown := sorted(wanted.keys() - set(RECORD_FIELDS)):
            raise ValueError(f"collect_fields: {unknown[0]} is none of {', '.join(RECORD_FIELDS)}")
        self._left_out: dict[str, Any] = {
            name: () if name in RECORD_FIELDS[:3] else {} for name, keep in wanted.items() if not keep
        }
        self.records: list[RunRecord] = []

    @contextmanager
    def run(
        self, conversation_id: str | None = None, *, task_id: str | None = None, run_id: str | None = None
    ) -> Iterator[RunCollection]:
        """A run to be filled within the block. It is recorded in the end, also if the block raises."""
        collection = RunCollection(conversation_id or f"conv_{uuid.uuid4().hex}", task_id=task_id, run_id=run_id)
        try:
            yield collection
        finally:
            self.records.append(replace(collection.record(), **self._left_out))

    def collect(
        self,
        agent: AgentLike,
        user_input: str,
        user_feedback: Mapping[str, Any] | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> RunRecord:
        """Run an agent on what a user said, and record it. Raises what the agent raises, and then records nothing.

        An agent is a function of the text, or one of AgentScope, whose messages are read from its memory. Calls in one
        thread share an event loop, so that it may keep its connections. Where one runs already, use `collect_async`.
        """
        return run_in_thread_loop(self.collect_async(agent, user_input, user_feedback, rewards))

    async def collect_async(
        self,
        agent: AgentLike,
        user_input: str,
        user_feedback: Mapping[str, Any] | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> RunRecord:
        """The same in an event loop; an agent that is no coroutine function blocks it."""
        turns = await _run_agent(agent, user_input)
        with self.run() as run:
            run.add(*turns)
            run.feedback(**(user_feedback or {}))
            for name, value in (rewards or {}).items():
                run.reward(name, value)
        return self.records[-1]

    def save(self, path: Path) -> int:
        """Append the records to a file of JSON lines, and forget them; how many there were."""
        count = write_records(path, self.records)
        self.records.clear()
        return count


async def _run_agent(agent: Any, user_input: str) -> list[object]:
    """All that was said in the run, what the user said first."""
    remember = _memory_of(agent)
    before = len(await remember()) if remember else 0
    question = _agentscope_message(user_input) if remember else user_input
    answer = agent(question)
    if inspect.isawaitable(answer):
        answer = await answer
    if remember and len(remembered := await remember()) > before:
        return list(remembered[before:])
    turns = list(answer) if isinstance(answer, Sequence) and not isinstance(answer, str) else [answer]
    first = chat_messages(turns)[:1]
    begins = bool(first) and first[0]["role"] in {"user", "system"}
    return turns if begins else [{"role": "user", "content": user_input}, *turns]


def _memory_of(agent: Any) -> Callable[[], Any] | None:
    """What reads the messages that an agent of AgentScope, 1.x or 2.x, remembers; None for other agents."""
    memory = getattr(getattr(agent, "memory", None), "get_memory", None)
    state = getattr(agent, "state", None)
    if callable(memory):

        async def read_memory() -> list[object]:
            found = memory()
            return list(await found if inspect.isawaitable(found) else found)

        return read_memory
    if isinstance(getattr(state, "context", None), list):

        async def read_state() -> list[object]:
            return list(agent.state.context)

        return read_state
    return None


def _agentscope_message(text: str) -> object:
    """A user's message as agents of AgentScope take it; the text, where an agent that remembers is not one of those."""
    module = sys.modules.get("agentscope.message")
    if module is None:
        return text
    return module.Msg(name="user", content=[module.TextBlock(type="text", text=text)], role="user")
