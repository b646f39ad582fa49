"""Records an agent's runs: messages, thoughts, tool calls, rewards and feedback."""

import asyncio
import contextvars
import inspect
import math
import os
import sys
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from tuneloop.runner.private_files import append_rows
from tuneloop.runner.rewards.reply import ChatMessage, Reply, calls_of, chat_messages, plain_object, text_of

_OPENS, _CLOSES = "<think>", "</think>"

RECORD_FIELDS = ("messages", "thoughts", "tool_calls", "rewards", "user_feedback")  # fields that a collector may drop


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A recorded run.

    `thoughts` are {step, content}: an assistant turn's reasoning, or text beside calls; turns count from 1.
    `tool_calls` are {tool, args, result}; args None: no JSON object, result None: no result. `reply_ids` are the
    service's, for feedback. `tools` names the offered tools.
    """

    conversation_id: str
    messages: tuple[ChatMessage, ...] = ()
    thoughts: tuple[Mapping[str, Any], ...] = ()
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    total_reward: float | None = None
    user_feedback: Mapping[str, Any] = field(default_factory=dict)
    task_id: str | None = None
    run_id: str | None = None
    reply_ids: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        if name not in self.__slots__:
            raise KeyError(name)
        return getattr(self, name)

    @classmethod
    def of_messages(cls, conversation_id: str, messages: Sequence[object], **known: Any) -> "RunRecord":
        """Record chat messages of any client (see `chat_messages`); `known` are further fields.

        `total_reward` defaults to the sum of the rewards. Raises ValueError for an invalid message or an infinite
        reward.

        >>> record = RunRecord.of_messages("c", [{"role": "user", "content": "Hello"}], rewards={"a": 0.8, "b": 0.5})
        >>> record.total_reward
        1.3
        """
        turns = tuple(chat_messages(list(messages)))
        rewards = known.get("rewards") or {}
        if wrong := [name for name, value in rewards.items() if not math.isfinite(value)]:
            raise ValueError(f"reward {wrong[0]}: {rewards[wrong[0]]} is not a reward")
        if rewards and known.get("total_reward") is None:
            known["total_reward"] = math.fsum(rewards.values())
        fields: dict[str, Any] = {"thoughts": tuple(_thoughts(turns)), "tool_calls": tuple(_tool_calls(turns))} | known
        return cls(conversation_id=conversation_id, messages=turns, **fields)

    def as_reply(self, **known: Any) -> Reply:
        """The run for reward components and judges; `known` are further fields, such as `expected`."""
        return Reply.of_trajectory(self.messages, **{"tools": self.tools} | known)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object without empty optional fields."""
        named = ("conversation_id", *RECORD_FIELDS, "total_reward")
        more = ("task_id", "run_id", "reply_ids", "tools")
        row = {name: _json(getattr(self, name)) for name in named}
        return row | {name: _json(getattr(self, name)) for name in more if getattr(self, name)}


def write_records(path: Path, records: Iterable[RunRecord]) -> int:
    """Append records to a private file of JSON lines, synced to disk; their number."""
    rows = [each.to_dict() for each in records]
    append_rows(path, rows)
    return len(rows)


def _thoughts(messages: Sequence[ChatMessage]) -> Iterator[dict[str, Any]]:
    turns = [each for each in messages if each["role"] == "assistant"]
    for step, turn in enumerate(turns, start=1):
        reasoning, text = str(turn.get("reasoning_content") or ""), text_of(turn.get("content"))
        before, closes, after = text.partition(_CLOSES)
        if closes:
            reasoning, text = "\n".join(filter(None, (reasoning, before.replace(_OPENS, "").strip()))), after
        if turn.get("tool_calls") and text.strip():
            reasoning = "\n".join(filter(None, (reasoning, text.strip())))
        if reasoning:
            yield {"step": step, "content": reasoning}


def _tool_calls(messages: Sequence[ChatMessage]) -> Iterator[dict[str, Any]]:
    """Calls with their results, matched by id, otherwise by order."""
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        answers = []
        for later in messages[at + 1 :]:
            if later["role"] == "assistant":
                break
            if later["role"] == "tool":
                answers.append(later)
        listed = message.get("tool_calls") or []
        for call, written in zip(calls_of(message), listed, strict=True):
            call_id, result = str(written.get("id") or ""), None
            by_id = [each for each in answers if call_id and each.get("tool_call_id") == call_id]
            if left := by_id or [each for each in answers if not call_id or not each.get("tool_call_id")]:
                answers.remove(left[0])
                result = text_of(left[0].get("content"))
            yield {
                "tool": call.name,
                "args": None if call.arguments is None else dict(call.arguments),
                "result": result,
            }


def _json(value: object) -> Any:
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    return dict(value) if isinstance(value, Mapping) else value


_Result = TypeVar("_Result")

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def run_in_own_loop(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run in this process's background loop, to which agents' connections stay bound. Raises RuntimeError in a loop."""
    if running_loop():
        coroutine.close()
        raise RuntimeError("an event loop runs in this thread: await the method that ends in _async")
    with _lock:
        if (loop := _loops.get(os.getpid())) is None:  # a forked child has no thread of its parent
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True, name="tuneloop-agents").start()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise


def running_loop() -> asyncio.AbstractEventLoop | None:
    """This thread's running event loop, or None."""
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def in_daemon_thread(work: Callable[[], _Result]) -> asyncio.Future[_Result]:
    """Run in a new daemon thread: a hanging one blocks neither others nor the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()
    context = contextvars.copy_context()

    def settle(set_: Callable[[Any], None], outcome: object) -> None:
        if not future.done():
            set_(outcome)

    def run() -> None:
        set_: Callable[[Any], None] = future.set_exception
        outcome: object
        try:
            set_, outcome = future.set_result, context.run(work)
        except BaseException as error:  # noqa: BLE001 - the awaiting caller gets it
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            outcome = (
                error if plain else RuntimeError(f"it ended with {error!r}")
            )  # other types would end the event loop
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(settle, set_, outcome)

    threading.Thread(target=run, daemon=True, name="tuneloop-run").start()
    return future


#: An agent: takes the user's text; returns a text, a message, a completion, or all messages of the run.
AgentLike = Callable[[Any], Any]


class RunCollection:
    def __init__(self, conversation_id: str, **labels: str | None) -> None:
        self.conversation_id = conversation_id
        self._labels = labels
        self._messages: list[ChatMessage] = []
        self._rewards: dict[str, float] = {}
        self._feedback: dict[str, Any] = {}
        self._reply_ids: list[str] = []

    def add(self, *messages: object) -> None:
        """Add messages or completions of any client in order; completions' ids are kept for feedback."""
        for each in messages:
            self._messages += chat_messages(each)
            if not isinstance(each, str | list | tuple):
                plain = plain_object(each)
                if plain.get("choices") and plain.get("id"):
                    self._reply_ids.append(str(plain["id"]))

    def reward(self, name: str, value: float) -> None:
        """Set a named reward, replacing an earlier value."""
        self._rewards[name] = float(value)

    def feedback(self, **labels: Any) -> None:
        """Add the user's feedback, such as rating=4, comment="right"."""
        self._feedback |= labels

    def record(self) -> RunRecord:
        return RunRecord.of_messages(
            self.conversation_id,
            self._messages,
            rewards=dict(self._rewards),
            user_feedback=dict(self._feedback),
            reply_ids=tuple(self._reply_ids),
            **self._labels,
        )


class DataCollector:
    """Collects the runs of an agent. `collect_fields` may switch parts off.

    >>> collector = DataCollector()
    >>> with collector.run("conv_001") as run:
    ...     run.add({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"})
    ...     run.reward("task_completion", 0.8)
    >>> collector.records[0].total_reward
    0.8
    """

    def __init__(self, collect_fields: Mapping[str, bool] | None = None) -> None:
        """Raises ValueError for an unknown field."""
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
        """Yield a run to fill in; it is recorded at the end, also after an exception."""
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
        """Run an agent (AgentScope's or a function of the text) in its own event loop, and record it."""
        return run_in_own_loop(self.collect_async(agent, user_input, user_feedback, rewards))

    async def collect_async(
        self,
        agent: AgentLike,
        user_input: str,
        user_feedback: Mapping[str, Any] | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> RunRecord:
        """As `collect`, in an event loop; a plain function runs in a thread."""
        turns = await _run_agent(agent, user_input)
        with self.run() as run:
            run.add(*turns)
            run.feedback(**(user_feedback or {}))
            for name, value in (rewards or {}).items():
                run.reward(name, value)
        return self.records[-1]

    def save(self, path: Path) -> int:
        """Append the records to a file of JSON lines and drop them; their number."""
        count = write_records(path, self.records)
        self.records.clear()
        return count


async def _run_agent(agent: Any, user_input: str) -> list[object]:
    """All messages of the run, the user's first."""
    remember = _memory_of(agent)
    before = len(await remember()) if remember else 0
    module = sys.modules.get("agentscope.message") if remember else None
    question: object = user_input
    if module is not None:
        question = module.Msg(name="user", content=[module.TextBlock(type="text", text=user_input)], role="user")
    called = getattr(agent, "__call__", None)  # noqa: B004 - an object with an async __call__ is async
    is_async = inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(called)
    answer = agent(question) if is_async else await in_daemon_thread(lambda: agent(question))
    if inspect.isawaitable(answer):
        answer = await answer
    if remember and len(remembered := await remember()) > before:
        return list(remembered[before:])
    turns = list(answer) if isinstance(answer, Sequence) and not isinstance(answer, str) else [answer]
    first = chat_messages(turns)[:1]
    begins = bool(first) and first[0]["role"] in {"user", "system"}
    return turns if begins else [{"role": "user", "content": user_input}, *turns]


def _memory_of(agent: Any) -> Callable[[], Any] | None:
    """A reader of the memory of an AgentScope agent (1.x or 2.x), or None."""
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
