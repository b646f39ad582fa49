"""Tools in shadow runs: what reads runs, what was recorded is answered from the record, anything else is refused."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.runner.feedback.service import FeedbackService
from tests.runner.shadow.recording import runner_of
from tuneloop.runner import ShadowResult, ShadowTools, TrainingRunner


class Shop:
    """An app with tools, and what they really did."""

    def __init__(self, tools: ShadowTools) -> None:
        self.done: list[tuple[str, ...]] = []
        self.find = tools.tool(self._find, read_only=True)
        self.buy = tools.tool(self._buy)
        self.buy_later = tools.tool(self._buy_later, name="buy_later")

    def _find(self, what: str, limit: int = 3) -> list[str]:
        self.done.append(("find", what))
        return [what] * limit

    def _buy(self, what: str) -> dict[str, Any]:
        """Buy it."""
        self.done.append(("buy", what))
        if what == "gone":
            raise LookupError(what)
        return {"bought": what, "number": len(self.done)}

    async def _buy_later(self, what: str) -> str:
        await asyncio.sleep(0)
        self.done.append(("later", what))
        return what


def rehearse(service: FeedbackService, production: Callable[[Shop], Any], shadow: Callable[[Shop], Any]) -> Any:
    """Production does one thing, its shadow another; what production really did, and what came of the shadow."""
    with runner_of(service.url) as (runner, results):
        shop = Shop(runner.tools)
        wrapped = runner.wrap(lambda: production(shop), agent=lambda run: lambda: shadow(shop))
        result = wrapped()
        if asyncio.iscoroutine(result):
            asyncio.run(result)
        really_done = list(shop.done)
    assert len(results) == 1, runner.counters()
    return shop, really_done, results[0]


def outcomes(result: ShadowResult) -> list[str]:
    return [each.outcome for each in result.tool_calls]


def test_what_was_done_is_answered_from_the_record_and_never_done_again(service: FeedbackService) -> None:
    shop, really_done, result = rehearse(service, lambda shop: shop.buy("tea"), lambda shop: shop.buy(what="tea"))
    assert shop.done == really_done == [("buy", "tea")]
    assert result.result == {"bought": "tea", "number": 1}
    assert outcomes(result) == ["recorded"]


def test_another_write_is_refused_with_a_result_that_says_so(service: FeedbackService) -> None:
    shop, really_done, result = rehearse(service, lambda shop: shop.buy("tea"), lambda shop: shop.buy("coffee"))
    assert shop.done == really_done
    refused = json.loads(result.result)
    assert "was not run" in refused["error"]
    assert (refused["tool"], refused["arguments"]) == ("_buy", {"what": "coffee"})
    assert outcomes(result) == ["refused"]


def test_what_only_reads_runs_unless_it_is_on_record(service: FeedbackService) -> None:
    shop, _, result = rehearse(
        service, lambda shop: shop.find("tea"), lambda shop: [shop.find("tea", limit=3), shop.find("milk", 1)]
    )
    assert shop.done == [("find", "tea"), ("find", "milk")]
    assert result.result == [["tea"] * 3, ["milk"]]
    assert outcomes(result) == ["recorded", "ran"]


def test_equal_calls_are_answered_in_their_order(service: FeedbackService) -> None:
    _, _, result = rehearse(
        service,
        lambda shop: [shop.buy("tea"), shop.buy("tea")],
        lambda shop: [shop.buy("tea")["number"] for _ in range(3)],
    )
    assert result.result == [1, 2, 2]


def test_a_recorded_error_is_raised_again(service: FeedbackService) -> None:
    def attempt(shop: Shop) -> str:
        try:
            return str(shop.buy("gone"))
        except LookupError as error:
            return f"no {error}"

    shop, really_done, result = rehearse(service, attempt, attempt)
    assert (shop.done, result.result) == (really_done, "no gone")


def test_what_the_shadow_changes_of_a_recorded_result_is_its_own(service: FeedbackService) -> None:
    def spoil(shop: Shop) -> Any:
        first = shop.buy("tea")
        first["bought"] = "spoilt"
        return shop.buy("tea")["bought"]

    assert rehearse(service, lambda shop: shop.buy("tea"), spoil)[2].result == "tea"


def test_async_tools_and_those_in_threads_and_tasks_are_recorded(service: FeedbackService) -> None:
    async def act(shop: Shop) -> list[Any]:
        return [
            await asyncio.gather(shop.buy_later("tea"), shop.buy_later("milk")),
            await asyncio.to_thread(shop.buy, "bread"),
        ]

    shop, really_done, result = rehearse(service, act, act)
    assert sorted(shop.done) == sorted(really_done)
    assert len(really_done) == 3
    assert outcomes(result) == ["recorded"] * 3

    shop, really_done, result = rehearse(service, act, lambda shop: shop.buy_later("wine"))
    assert shop.done == really_done
    assert json.loads(result.result)["tool"] == "buy_later"


def test_a_write_below_a_tool_that_reads_is_refused_too(service: FeedbackService) -> None:
    with runner_of(service.url) as (runner, results):
        shop = Shop(runner.tools)
        sly = runner.tools.tool(lambda: shop.buy("tea"), read_only=True, name="sly")
        runner.wrap(lambda: 1, agent=lambda run: sly)()
    assert shop.done == []
    assert outcomes(results[0]) == ["ran", "refused"]


def test_a_reward_calculator_writes_nothing_either(service: FeedbackService) -> None:
    shops: list[Shop] = []
    with runner_of(service.url, reward_calculator=lambda result: shops[0].buy("tea") and 1.0) as (runner, _):
        shops.append(Shop(runner.tools))
        runner.wrap(str.upper)("a")
    assert shops[0].done == []
    assert runner.counters()["rewarded"] == 1


def test_outside_of_calls_tools_do_as_ever() -> None:
    runner = TrainingRunner(service="http://localhost", model="t", agent=fail, reward_calculator=fail)
    shop = Shop(runner.tools)
    assert shop.buy("tea") == {"bought": "tea", "number": 1}
    assert asyncio.run(shop.buy_later("tea")) == "tea"
    with pytest.raises(TypeError):
        shop.buy("tea", "more")
    assert (shop.buy.__doc__, shop.buy.__name__) == ("Buy it.", "_buy")


def fail(*args: object) -> Any:
    raise AssertionError


def test_as_decorators_with_a_refusal_of_ones_own(service: FeedbackService) -> None:
    tools = ShadowTools(refusal=lambda name, arguments: [name, json.loads(arguments)])

    @tools.tool
    def send(to: str, /, *rest: str, **more: object) -> None:
        raise AssertionError

    @tools.tool(read_only=True)
    def look(thing: object) -> str:
        return "seen"

    with runner_of(service.url) as (runner, results):
        runner.wrap(lambda: None, agent=lambda run: lambda: [send("ann", "bob", cc=1), look(object())])()
    assert results[0].result == [["send", {"to": "ann", "rest": ["bob"], "more": {"cc": 1}}], "seen"]
