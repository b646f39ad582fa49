"""One shadow run: the call once more, by an agent whose model is the service's."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tuneloop.runner.models.bound_model import CallDefaults, ClientKind, make_model
from tuneloop.runner.models.run import Run
from tuneloop.runner.production.call_context import RecordedToolCall, in_context
from tuneloop.runner.production.shadow_tools import Replay, RunTools, ShadowToolCall, ShadowTools, copy_or_same
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
    """A production call that was answered. `select` is still to be asked where it is not None."""

    call: ProductionCall
    agent: AgentFactory
    recorded: tuple[RecordedToolCall, ...]
    select: Callable[[ProductionCall], bool] | None = None


async def rehearse(job: ShadowJob, run: ShadowRun, tools: ShadowTools) -> ShadowResult:
    """Do it once more. Raises what the agent raises."""
    replay = Replay(job.recorded)
    run = replace(run, tools=tools.bound_to(replay))

    def act() -> Any:
        # Of their own for each run: agents change what they are given.
        args, kwargs = copy_or_same(job.call.args), copy_or_same(dict(job.call.kwargs))
        return job.agent(run)(*args, **kwargs)

    result = await _finish(act, replay)
    return ShadowResult(run=run, call=job.call, result=result, tool_calls=tuple(replay.calls))


async def finish(function: Callable[[], Any]) -> Any:
    """The result of a function, run in a thread, and awaited here if it is to be. Its tools write nothing."""
    return await _finish(function, Replay(()))


async def _finish(function: Callable[[], Any], within: object) -> Any:
    context = contextvars.copy_context()

    def act() -> Any:
        with in_context(within):
            return function()

    async def go_on(awaited: Awaitable[Any]) -> Any:
        with in_context(within):
            return await awaited

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
