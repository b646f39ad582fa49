"""How the control process and a worker talk."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tuneloop.explorer.channel import (
    AnnounceOwner,
    BeginFile,
    Channel,
    CollectMetrics,
    EngineView,
    GetExposition,
    GetStartInfo,
    ReportMetrics,
    UpdateEngine,
    UpdateSplit,
    WaitUntilIdle,
    WaitUntilTaken,
)
from tuneloop.explorer.engines.fleet import EngineState, TrafficSplit
from tuneloop.explorer.metrics import MetricSample
from tuneloop.shared.errors import ChannelLost

Answering = Callable[[Any], Awaitable[Any]]


async def silent(question: Any) -> object:
    return None


@asynccontextmanager
async def talking(one: Answering = silent, other: Answering = silent) -> AsyncIterator[tuple[Channel, Channel]]:
    ends = socket.socketpair()
    channels = [await Channel.over(end, each) for end, each in zip(ends, (one, other), strict=True)]
    running = [asyncio.ensure_future(each.run()) for each in channels]
    yield channels[0], channels[1]
    for each in channels:
        each.close()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_questions_are_answered_both_ways_at_once() -> None:
    samples = [MetricSample("requests", "requests_total", (("status", "200"),), 3.0)]

    async def counts(question: Any) -> object:
        assert question == CollectMetrics()
        return samples

    async def waits(question: Any) -> object:
        return question.timeout_s > 1

    async with talking(counts, waits) as (worker, control):
        told = await asyncio.gather(
            control.ask(CollectMetrics(), list[MetricSample]),
            worker.ask(WaitUntilTaken(2.0), bool),
            worker.ask(WaitUntilTaken(0.5), bool),
        )
    assert told == [samples, True, False]


@pytest.mark.parametrize(
    "question",
    [
        GetStartInfo(),
        AnnounceOwner("0123abcd"),
        UpdateSplit(TrafficSplit(3, share=0.1)),
        UpdateSplit(None),
        GetExposition(),
        ReportMetrics([MetricSample("a", "a_total", (), 1.0)]),
        UpdateEngine(EngineView(1, "http://e", None, EngineState.RELOADING, 3, 2)),
        WaitUntilIdle(1),
        BeginFile(),
    ],
)
async def test_a_question_arrives_as_it_was_asked(question: Any) -> None:
    heard: list[Any] = []

    async def hears(asked: Any) -> object:
        heard.append(asked)
        return b"\xff" * 100_000

    async with talking(other=hears) as (one, _):
        assert await one.ask(question, bytes) == b"\xff" * 100_000
    assert heard == [question]


async def test_questions_are_taken_up_in_their_order() -> None:
    heard: list[float] = []

    async def hears(asked: Any) -> object:
        heard.append(asked.timeout_s)
        await asyncio.sleep(0)
        return None

    async with talking(other=hears) as (one, _):
        await asyncio.gather(*(one.ask(WaitUntilTaken(float(number))) for number in range(1000)))
    assert heard == [float(number) for number in range(1000)]


async def test_an_answer_that_waits_keeps_no_other_back() -> None:
    let_go = asyncio.Event()

    async def waits(asked: Any) -> object:
        if isinstance(asked, WaitUntilIdle):
            await let_go.wait()
        return None

    async with talking(other=waits) as (one, _):
        waiting = asyncio.ensure_future(one.ask(WaitUntilIdle(0)))
        await one.ask(GetStartInfo())
        assert not waiting.done()
        let_go.set()
        await waiting


async def test_who_does_not_answer_in_time_is_lost() -> None:
    async def never(asked: Any) -> object:
        await asyncio.Event().wait()
        return None

    async with talking(other=never) as (one, _):
        with pytest.raises(ChannelLost, match="does not answer"):
            await one.ask(GetStartInfo(), timeout_s=0.01)


async def test_who_fails_says_so_and_hears_on() -> None:
    async def fails(asked: Any) -> object:
        if isinstance(asked, GetStartInfo):
            raise ValueError("no")
        return 1

    async with talking(other=fails) as (one, _):
        with pytest.raises(ChannelLost, match="could not"):
            await one.ask(GetStartInfo())
        assert await one.ask(CollectMetrics(), int) == 1


async def test_those_who_wait_are_told_that_the_other_is_gone() -> None:
    async def never(asked: Any) -> object:
        await asyncio.Event().wait()
        return None

    async with talking(other=never) as (one, other):
        waiting = asyncio.ensure_future(one.ask(GetStartInfo()))
        await asyncio.sleep(0.01)
        other.close()
        with pytest.raises(ChannelLost, match="gone"):
            await waiting
        with pytest.raises(ChannelLost, match="gone"):
            await one.ask(GetStartInfo())
