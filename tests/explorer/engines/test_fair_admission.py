"""Callers share the places: one that sends very much leaves the others theirs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tuneloop.explorer.engines.admission import Admission
from tuneloop.shared.errors import RequestRefused


def places(limit: int, max_waiting: int = 100) -> Admission:
    return Admission(limit=limit, max_waiting=max_waiting, wait_timeout_s=60)


@asynccontextmanager
async def waiting(admission: Admission, callers: str) -> AsyncIterator[tuple[list["asyncio.Task[None]"], list[str]]]:
    """Requests of these callers, each a letter, that wait in this order; who was let in, in which order."""
    came_in: list[str] = []

    async def come(caller: str) -> None:
        await admission.acquire(caller)
        came_in.append(caller)

    tasks = []
    for caller in callers:
        tasks.append(asyncio.create_task(come(caller)))
        await asyncio.sleep(0)
    try:
        yield tasks, came_in
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_has_the_least_in_flight_is_next() -> None:
    admission = places(4)
    for _ in range(4):
        await admission.acquire("a")
    async with waiting(admission, "aaaabbc") as (_, came_in):
        for _ in range(4):
            admission.release("a")
            await asyncio.sleep(0)
        assert came_in == ["b", "c", "a", "b"]


async def test_one_caller_alone_is_served_in_its_order() -> None:
    admission = places(1)
    await admission.acquire()
    async with waiting(admission, "aaa") as (tasks, _):
        admission.release()
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [True, False, False]


async def test_who_fills_the_queue_gives_way_to_others() -> None:
    admission = places(1, max_waiting=4)
    await admission.acquire("a")
    async with waiting(admission, "aaaa") as (tasks, _), waiting(admission, "bb") as (others, _):
        await asyncio.sleep(0)
        refused = [task for task in tasks if task.done()]
        assert refused == tasks[2:]
        for task in refused:
            with pytest.raises(RequestRefused, match="requests are in flight"):
                task.result()
        assert not any(task.done() for task in others)
        assert admission.waiting == 4
        for caller in "ab":
            with pytest.raises(RequestRefused):
                await admission.acquire(caller)


async def test_nothing_is_left_of_who_came_and_went() -> None:
    admission = places(2)
    for _ in range(2):
        await admission.acquire("x")
    async with waiting(admission, "abab"):
        assert admission.waiting == 4
    assert (admission.waiting, admission.in_flight) == (0, 2)
    for _ in range(2):
        admission.release("x")
    assert admission.in_flight == 0
