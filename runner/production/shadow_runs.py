"""One shadow run: the call once more, by an agent whose model is the service's."""

import asyncio
import contextvars
import inspect
import math
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tuneloop.runner.models.bound_model import CallDefaults, ClientKind, make_model
from tuneloop.runner.models.run import Run
from tuneloop.runner.production.bounded_copy import copy_or_same
from tuneloop.runner.production.call_context import RecordedToolCall, in_context
from tuneloop.runner.production.shadow_tools import Replay, RunTools, ShadowToolCall
from tuneloop.runner.production.strategies import ProductionCall
from tuneloop.runner.rewards.composite import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowRun(Run):
    """What a shadow agent is made with: a run, `base_url` and `api_key` bind any client to it, and the model's name.

    `tools` are the app's, bound to it: in whatever thread they are called, they write nothing.
    """

    model: str
    tools: RunTools = field(default_factory=lambda: RunTools({}, Replay(())), compare=False, repr=False)

    def chat_model(self, client: ClientKind = "auto", **defaults: Any) -> Any:
        """An AgentScope chat model where AgentScope is installed, else an AsyncOpenAI client; `client` chooses.

        `defaults` are sampling parameters, such as `temperature`, of requests that do not have them.
        """
        return make_model(self, CallDefaults(model_name=self.model, **defaults), client=client)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowResult:
    """What a reward is calculated of: what the shadow agent answered, beside what production did.

    `call.args` and `call.kwargs` are what both were asked; `tool_calls` are those of tools that were wrapped.
    """

    run: ShadowRun
    call: ProductionCall
    result: Any
    tool_calls: tuple[ShadowToolCall, ...]

    @property
    def production_result(self) -> Any:
        """What the user got."""
        return self.call.result


#: Makes the agent of a shadow run: what it returns is called as production was.
AgentFactory = Callable[[ShadowRun], Callable[..., Any]]

#: The reward: a number, a thumb, or a Score, whose components are told too. None: there is no reward.
Reward = float | bool | Score | None
RewardCalculator = Callable[[ShadowResult], Reward | Awaitable[Reward]]


@dataclass(slots=True, kw_only=True)
class ShadowJob:
    """A production call that was answered, in an event `loop` or in none.

    `select` is still to be asked where it is not None.
    """

    call: ProductionCall
    agent: AgentFactory
    recorded: tuple[RecordedToolCall, ...]
    select: Callable[[ProductionCall], bool] | None = None
    loop: asyncio.AbstractEventLoop | None = None


class Counts(Protocol):
    """What is told how shadow runs go."""

    def add(self, kind: str, count: int = 1) -> None:
        """Something of a kind happened."""

    def fail(self, kind: str, error: BaseException) -> None:
        """A failure of a kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsals:
    """Makes shadow runs in this process, and has their answers rewarded, each for at most `timeout_s`."""

    reward_calculator: RewardCalculator
    timeout_s: float
    counts: Counts

    async def make(
        self, agent: AgentFactory, call: ProductionCall, run: ShadowRun, replay: Replay, judged_in: Replay | None = None
    ) -> tuple[Reward] | None:
        """The reward of one run; None if there is none as something failed. Tools of the calculator are `judged_in`."""
        result = await self._within_time("shadow", _rehearse(agent, call, run, replay))
        if result is None:
            return None
        if sentence := run.calls.outage:
            self.counts.fail("service_away", ConnectionError(sentence))
            return None
        self.counts.add("completed")

        async def calculate() -> tuple[Reward]:
            return (await finish(lambda: self.reward_calculator(result), judged_in or Replay((), replay.loop)),)

        rewarded: tuple[Reward] | None = await self._within_time("reward", calculate())
        return rewarded

    async def _within_time(self, kind: str, work: Any) -> Any:
        """The result of some work, or None if it failed or took too long.

        What cannot be cancelled, such as a thread, holds its place among the runs until it ends: there are never more
        of them than that.
        """
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        if not done:
            late = TimeoutError(f"no end in {self.timeout_s:g} s")
            self.counts.fail(f"{kind}_timed_out" if kind == "shadow" else f"{kind}_failed", late)
            task.cancel()
            await asyncio.wait({task})
            return None
        try:
            return task.result()
        except Exception as error:  # noqa: BLE001 - the app must not feel what goes wrong here
            self.counts.fail(f"{kind}_failed", error)
            return None


async def _rehearse(agent: AgentFactory, call: ProductionCall, run: ShadowRun, replay: Replay) -> ShadowResult:
    """Do it once more. Raises what the agent raises."""

    def act() -> Any:
        # Of their own for each run: agents change what they are given.
        args, kwargs = copy_or_same(call.args, math.inf), copy_or_same(dict(call.kwargs), math.inf)
        return agent(run)(*args, **kwargs)

    result = await finish(act, replay)
    return ShadowResult(run=run, call=call, result=result, tool_calls=tuple(replay.calls))


async def finish(function: Callable[[], Any], within: Replay | None = None) -> Any:
    """The result of a function, run in a thread, and awaited here if it is to be.

    Its tools do as they would in the shadow run `within` which it is called; outside of any they write nothing.
    """
    return await _finish(function, within or Replay(()))


async def _finish(function: Callable[[], Any], within: object) -> Any:
    context = contextvars.copy_context()

    def act() -> Any:
        with in_context(within):
            return function()

    async def go_on(awaited: Awaitable[Any]) -> Any:
        with in_context(within):
            try:
                return await awaited
            except SystemExit as error:  # which would end the event loop, and all other runs with it
                raise RuntimeError(repr(error)) from error

    result = await in_thread(lambda: context.run(act))
    if inspect.isawaitable(result):
        task = asyncio.get_running_loop().create_task(go_on(result), context=context)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
    return result


async def in_thread(function: Callable[[], Any]) -> Any:
    """The result of a function in a daemon thread: one that never ends does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - SystemExit too is the caller's to hear of
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="tuneloop-shadow", daemon=True).start()
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})  # a thread cannot be cancelled
        raise
