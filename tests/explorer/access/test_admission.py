"""Places under every order of coming, going, waiting too long and giving up that hypothesis thinks of.

Callers share them: one that sends very much leaves the others theirs."""

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.doubles.engine import EngineDouble
from tests.explorer.access.test_keys import CHAT, MakeKey, code, make_key, secret_of
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.wire import Wire, http_request
from tuneloop.explorer.limits import Admission, BodyLimits, KeyMeter, KeyUsage, RequestMeter
from tuneloop.explorer.transcript import ChatTranscript, RequestedFields, TextTranscript, Transcript
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyLimits

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
async def waiting(
    admission: Admission, callers: Iterable[str]
) -> AsyncIterator[tuple[list["asyncio.Task[None]"], list[str]]]:
    """Requests of these callers that wait in this order; who was let in, in which order."""
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


async def test_a_tenant_has_no_more_of_the_places_for_having_more_keys() -> None:
    admission = places(4)
    for _ in range(4):
        await admission.acquire("many/1")
    callers = ["many/2", "many/3", "many/2", "many/4", "one/1", "one/1"]
    async with waiting(admission, callers) as (tasks, came_in):
        for _ in range(4):
            admission.release("many/1")
            await asyncio.sleep(0)
        assert came_in == ["one/1", "one/1", "many/2", "many/3"]
        for _ in range(2):
            admission.release("one/1")
        await asyncio.gather(*tasks)
        for caller in callers[:4]:
            admission.release(caller)
        assert admission.in_flight == 0


async def test_the_tenant_with_the_most_waiting_gives_way_by_its_key_with_the_most() -> None:
    admission = places(1, max_waiting=6)
    await admission.acquire("x/1")
    callers = ("many/1", "many/1", "many/2", "many/3", "one/1", "one/1")
    async with waiting(admission, callers) as (tasks, _), waiting(admission, ["one/2"]):
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [False, True, False, False, False, False]
        with pytest.raises(RequestRefused, match="requests are in flight"):
            tasks[1].result()
        with pytest.raises(RequestRefused):
            await admission.acquire("many/1")


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


# What a key's tokens are counted by: nobody has text read or sampled without that it costs them tokens.


__all__ = ["make_key"]

USAGE = {"prompt_tokens": 400, "completion_tokens": 100, "total_tokens": 500}


def meter_of(body_bytes: int) -> tuple[RequestMeter, KeyUsage]:
    """The meter of a request, and what its key has taken."""
    key = KeyMeter(KeyLimits())
    found = RequestMeter(BodyLimits(), key)
    found.expect(body_bytes=body_bytes, choices=1, most=None)
    return found, key.usage


def fed(transcript: Transcript, piece: dict[str, Any]) -> Transcript:
    transcript.feed(json.dumps(piece).encode())
    return transcript


def text_choice(index: int, prompt: list[int] | None, ids: list[int] | None) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-0.5] * len(ids or ())}
    return {
        "index": index,
        "text": "abcdefgh",
        "finish_reason": "stop",
        "prompt_token_ids": prompt,
        "token_ids": ids,
        "logprobs": logprobs,
    }


def test_each_prompt_of_a_list_is_counted_and_of_several_choices_once() -> None:
    choices = [text_choice(index, [1, 2, 3], [7]) for index in range(6)]
    heard = fed(TextTranscript("cmpl-x", RequestedFields(), of_each=2), {"id": "cmpl-x", "choices": choices})
    assert heard.tokens == 3 * 3 + 6


@pytest.mark.parametrize("usage", [None, 5, {}, {"total_tokens": "many"}, {"total_tokens": -3}])
def test_a_count_that_cannot_be_read_leaves_that_of_the_ids(usage: object) -> None:
    piece = {"id": "cmpl-x", "choices": [text_choice(0, [1, 2, 3], [7])], "usage": usage}
    assert fed(TextTranscript("cmpl-x", RequestedFields()), piece).tokens == 4


@pytest.mark.parametrize(
    "heard",
    [
        fed(
            TextTranscript("cmpl-x", RequestedFields()),
            {"id": "cmpl-x", "choices": [text_choice(0, None, None)], "usage": USAGE},
        ),
        fed(ChatTranscript("chatcmpl-x", RequestedFields()), {"id": "chatcmpl-x", "choices": [], "usage": USAGE}),
    ],
    ids=["text", "chat"],
)
def test_what_the_engine_counts_is_counted_where_it_tells_no_ids(heard: Transcript) -> None:
    meter, usage = meter_of(10)
    meter.count_tokens(heard)
    assert usage.tokens == 500


def test_without_any_count_text_is_counted_by_its_length_and_once() -> None:
    heard = fed(TextTranscript("cmpl-x", RequestedFields()), {"id": "cmpl-x", "choices": [text_choice(0, None, None)]})
    meter, usage = meter_of(392)
    meter.count_tokens(heard)
    meter.count_tokens(heard, broken_off=True)
    assert usage.tokens == 100


@pytest.mark.parametrize("body", [HELLO, HELLO | {"stream": True}])
def test_who_leaves_before_the_reply_pays_for_it(
    explorer: RunningExplorer, make_key: MakeKey, double: EngineDouble, body: dict[str, Any]
) -> None:
    key = make_key(Scope.INFERENCE, limits=KeyLimits(tokens_per_minute=5))
    double.silent = True
    with Wire(explorer.url) as wire:
        wire.send(http_request(json.dumps(body).encode(), f"x-api-key: {secret_of(key)}"))
        eventually(lambda: bool(double.chats))
    double.silent = False
    eventually(lambda: explorer.http.post(CHAT, json=HELLO, headers=key).status_code == 429)


def test_a_text_to_be_read_costs_tokens(explorer: RunningExplorer, make_key: MakeKey) -> None:
    key = make_key(Scope.INFERENCE, limits=KeyLimits(tokens_per_minute=50))
    text = {"model": "tiny", "prompt": "x" * 400}
    assert explorer.http.post("/tokenize", json=text, headers=key).status_code == 200
    assert code(explorer.http.post("/tokenize", json=text, headers=key)) == (429, "key_limit_tokens")


def test_so_many_choices_and_no_more(explorer: RunningExplorer) -> None:
    assert code(explorer.http.post(CHAT, json=HELLO | {"n": 129})) == (400, "too_many_choices")
    prompts = {"model": HELLO["model"], "prompt": ["x"] * 513, "n": 2}
    assert code(explorer.http.post("/v1/completions", json=prompts)) == (400, "too_many_choices")
    assert explorer.http.post("/v1/completions", json=prompts | {"n": 1}).json().get("error", {}).get("code") != (
        "too_many_choices"
    )
