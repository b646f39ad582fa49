"""Places under every order of coming, going, waiting too long and giving up that hypothesis thinks of.

Callers share them: one that sends very much leaves the others theirs.
"""

import asyncio
import selectors
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tuneloop.explorer.limits import Admission
from tuneloop.shared.errors import RequestRefused

PATIENCE_S = 1000.0


class Clock(asyncio.SelectorEventLoop):
    """A loop whose clock is set by the test."""

    ahead_s = 0.0

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())

    def time(self) -> float:
        return super().time() + self.ahead_s


class Client:
    """A request that stays in flight until the test ends it."""

    def __init__(self, admission: Admission, loop: asyncio.AbstractEventLoop) -> None:
        self.holds = False
        self.refused: RequestRefused | None = None
        self._leave = asyncio.Event()
        self.task = loop.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        try:
            await admission.acquire()
        except RequestRefused as error:
            self.refused = error
            return
        try:
            self.holds = True
            await self._leave.wait()
        finally:
            self.holds = False
            admission.release()

    def leave(self) -> None:
        self._leave.set()


class AnyOrder(RuleBasedStateMachine):
    """`clients` are in the order in which they came."""

    @initialize(places=st.integers(1, 3), waiting=st.integers(0, 4))
    def open(self, places: int, waiting: int) -> None:
        self.loop = Clock()
        self.most, self.most_waiting = places, waiting
        self.admission = Admission(limit=places, max_waiting=waiting, wait_timeout_s=PATIENCE_S)
        self.clients: list[Client] = []

    def settle(self) -> None:
        for _ in range(6):
            self.loop.run_until_complete(asyncio.sleep(0))

    def those(self, *, hold: bool) -> list[Client]:
        return [each for each in self.clients if not each.task.done() and each.holds == hold]

    @rule()
    def come(self) -> None:
        held, waiting = self.admission.in_flight, self.admission.waiting
        client = Client(self.admission, self.loop)
        self.clients.append(client)
        self.settle()
        if held < self.most:
            assert client.holds
        elif waiting >= self.most_waiting:
            assert client.refused
            assert (client.refused.status, client.refused.retry_after_s) == (429, 1.0)
        else:
            assert self.admission.waiting == waiting + 1

    @precondition(lambda self: self.those(hold=True))
    @rule(data=st.data(), hurried=st.booleans())
    def go(self, data: st.DataObject, hurried: bool) -> None:
        next_one = next(iter(self.those(hold=False)), None)
        leaving = data.draw(st.sampled_from(self.those(hold=True)))
        leaving.leave() if data.draw(st.booleans()) else leaving.task.cancel()
        if hurried:  # whoever is next gives up between being given the place and having it
            self.loop.run_until_complete(asyncio.sleep(0))
            if next_one:
                next_one.task.cancel()
            self.settle()
            return
        self.settle()
        assert next_one is None or next_one.holds

    @precondition(lambda self: self.those(hold=False))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.those(hold=False))).task.cancel()
        self.settle()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def several_things_at_once(self, data: st.DataObject) -> None:
        for client in data.draw(st.lists(st.sampled_from(self.clients), unique=True, max_size=4)):
            client.leave() if client.holds and data.draw(st.booleans()) else client.task.cancel()
        if data.draw(st.booleans()):
            self.loop.ahead_s += PATIENCE_S + 1
        self.settle()

    @rule()
    def wait_too_long(self) -> None:
        waited = self.those(hold=False)
        self.loop.ahead_s += PATIENCE_S + 1
        self.settle()
        for each in waited:
            assert each.refused
            assert (each.refused.status, each.refused.code) == (503, "overloaded")

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "admission"):
            return
        holding, waiting = self.those(hold=True), self.those(hold=False)
        assert self.admission.in_flight == len(holding) <= self.most
        assert self.admission.waiting == len(waiting) <= self.most_waiting
        assert not waiting or len(holding) == self.most, "a place is free and somebody waits"

    def teardown(self) -> None:
        for each in self.clients:
            each.task.cancel()
        self.settle()
        assert (self.admission.in_flight, self.admission.waiting) == (0, 0)
        self.loop.close()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=25)


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


async def come(admission: Admission, caller: str, came_in: list[str]) -> None:
    await admission.acquire(caller)
    came_in.append(caller)


async def test_a_tenant_has_no_more_of_the_places_for_having_more_keys() -> None:
    admission, came_in = places(4), list[str]()
    for _ in range(4):
        await admission.acquire("many/1")
    callers = ["many/2", "many/3", "many/2", "many/4", "one/1", "one/1"]
    tasks = []
    for caller in callers:
        tasks.append(asyncio.create_task(come(admission, caller, came_in)))
        await asyncio.sleep(0)
    for _ in range(4):
        admission.release("many/1")
        await asyncio.sleep(0)
    assert came_in == ["one/1", "one/1", "many/2", "many/3"]
    admission.release("one/1")
    admission.release("one/1")
    await asyncio.gather(*tasks)
    for caller in callers:
        admission.release(caller) if caller != "one/1" else None
    assert admission.in_flight == 0


async def test_the_tenant_with_the_most_waiting_gives_way_by_its_key_with_the_most() -> None:
    admission, came_in = places(1, max_waiting=6), list[str]()
    await admission.acquire("x/1")
    tasks = []
    for caller in ("many/1", "many/1", "many/2", "many/3", "one/1", "one/1"):
        tasks.append(asyncio.create_task(come(admission, caller, came_in)))
        await asyncio.sleep(0)
    late = asyncio.create_task(come(admission, "one/2", came_in))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [False, True, False, False, False, False]
    with pytest.raises(RequestRefused, match="requests are in flight"):
        tasks[1].result()
    with pytest.raises(RequestRefused):
        await admission.acquire("many/1")
    for task in (*tasks, late):
        task.cancel()
    await asyncio.gather(*tasks, late, return_exceptions=True)


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
