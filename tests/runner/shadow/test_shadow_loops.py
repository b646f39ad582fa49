"""Async tools in shadow runs: they are awaited in the event loop that production calls them in, or not at all."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.explorer.running import eventually
from tests.runner.feedback.service import FeedbackService
from tests.runner.shadow.recording import runner_of
from tuneloop.runner import ShadowTools, TrainingRunner


async def test_connections_that_production_shares_with_shadow_runs_serve_both(service: FeedbackService) -> None:
    tools = ShadowTools()
    async with httpx.AsyncClient() as client:

        @tools.tool(read_only=True)
        async def look(url: str) -> int:
            return (await client.get(url)).status_code

        async def fetch(url: str) -> int:
            await look(url)
            return await look(f"{url}/other")

        again: dict[str, Any] = {"agent": lambda run: lambda url: look(f"{url}/again"), "tools": tools}
        with runner_of(service.url, **again) as (runner, results):
            ask = runner.wrap(fetch)
            for number in range(1, 6):
                assert await ask(service.url) == 501
                await asyncio.to_thread(eventually, lambda number=number: _ended(runner) == number)
            assert await asyncio.to_thread(runner.stop, 30)
    assert [(each.result, each.tool_calls[0].outcome) for each in results] == [(501, "ran")] * 5


def _ended(runner: TrainingRunner) -> int:
    return runner.counters()["completed"] + runner.counters()["shadow_failed"]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop of the app's, in a thread of its own."""
    found = asyncio.new_event_loop()
    thread = threading.Thread(target=found.run_forever)
    thread.start()
    yield found
    found.call_soon_threadsafe(found.stop)
    thread.join()
    found.close()


async def say_where(what: str) -> int:
    return id(asyncio.get_running_loop())


class Saying:
    async def __call__(self, what: str) -> int:
        return await say_where(what)


@pytest.mark.parametrize("tool", [say_where, Saying(), lambda what: say_where(what)])
def test_a_tool_is_awaited_where_production_awaits_it(
    service: FeedbackService, loop: asyncio.AbstractEventLoop, tool: Any
) -> None:
    tools = ShadowTools()
    look = tools.tool(tool, read_only=True, name="look")

    async def production() -> Any:
        return await look("a")

    with runner_of(service.url, tools=tools) as (runner, results):
        ask = runner.wrap(
            lambda: asyncio.run_coroutine_threadsafe(production(), loop).result(30),
            agent=lambda run: lambda: run.tools["look"]("b"),
        )
        assert ask() == id(loop)
        assert runner.stop(30)
    assert results[0].result == id(loop)
    assert [each.outcome for each in results[0].tool_calls] == ["ran"]


async def leave(what: str) -> None:
    raise SystemExit(what)


async def cancel_itself(what: str) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("tool", [leave, cancel_itself])
async def test_what_ends_a_tool_in_a_shadow_run_ends_neither_production_nor_the_runner(
    service: FeedbackService, tool: Any
) -> None:
    tools = ShadowTools()
    tools.tool(tool, read_only=True, name="look")
    with runner_of(service.url, tools=tools, concurrency=1) as (runner, results):
        ask = runner.wrap(lambda text: text, agent=lambda run: run.tools["look"])
        ask("a")
        ask("b")
        assert await asyncio.to_thread(runner.stop, 30)
    assert results == []
    assert runner.counters() | {"shadow_failed": 2, "runner_failed": 0} == runner.counters()
