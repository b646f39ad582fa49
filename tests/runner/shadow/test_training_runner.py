"""The runner in an app: what users get, what is run again, and that nothing of ours reaches the app."""

import asyncio
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.running import eventually
from tests.runner.feedback.service import FeedbackService, taken
from tests.runner.shadow.recording import runner_of
from tuneloop.runner import Composite, ProductionCall, Reply, SamplingRateStrategy, ShadowRun, TrainingRunner

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[3]
NOWHERE = "http://127.0.0.1:9"


class Broken(Exception):
    pass


def fail(*args: object) -> Any:
    raise Broken("of ours")


class Agent:
    def __call__(self, text: str) -> str:
        return text.upper()

    async def answer(self, text: str) -> str:
        await asyncio.sleep(0)
        return text.upper()


async def answer(text: str) -> str:
    return text.upper()


CALLABLES: list[Callable[[str], Any]] = [
    lambda text: text.upper(),
    Agent(),
    Agent().answer,
    answer,
    functools.partial(answer),
    lambda text: answer(text),
    str.upper,
]


@pytest.mark.parametrize("call", CALLABLES, ids=range(len(CALLABLES)))
async def test_whatever_is_wrapped_answers_as_before_and_is_run_again(
    service: FeedbackService, call: Callable[[str], Any]
) -> None:
    with runner_of(service.url, agent=lambda run: call) as (runner, results):
        result = runner.wrap(call)("a")
        assert (await result if asyncio.iscoroutine(result) else result) == "A"
    assert [(each.result, each.production_result, each.call.args) for each in results] == [("A", "A", ("a",))]


def test_an_answer_is_the_very_object_that_production_gave(service: FeedbackService) -> None:
    given = {"answer": [1]}
    with runner_of(service.url) as (runner, results):
        assert runner.wrap(lambda: given)() is given
        given["answer"].append(2)
    assert results[0].production_result == {"answer": [1]}


def test_a_decorated_function_keeps_its_name_and_has_an_agent_of_its_own(service: FeedbackService) -> None:
    with runner_of(service.url, agent=fail) as (runner, results):

        @runner.shadow(agent=lambda run: lambda text: f"{run.model} says {text}")
        def ask(text: str) -> str:
            """Ask."""
            return text

        ask("a")
    assert (ask.__name__, ask.__doc__) == ("ask", "Ask.")
    assert results[0].result == "t says a"
    assert results[0].call.name.endswith("ask")


def test_the_inputs_of_a_shadow_run_are_those_before_production_changed_them(service: FeedbackService) -> None:
    def act(messages: list[str], *, options: dict[str, int]) -> int:
        messages.append("more")
        options["depth"] += 1
        return len(messages)

    with runner_of(service.url, agent=lambda run: act, repeat_time=2) as (runner, results):
        assert runner.wrap(act)(["one"], options={"depth": 0}) == 2
    assert [each.result for each in results] == [2, 2]
    assert results[0].call.kwargs == {"options": {"depth": 0}}


def test_repeated_runs_are_a_group(service: FeedbackService) -> None:
    with runner_of(service.url, repeat_time=3) as (runner, results):
        runner.wrap(str.upper)("a")
        runner.wrap(str.upper)("b")
    tasks = {each.run.task_id for each in results}
    assert len(tasks) == 2
    for task in tasks:
        assert [each.run.run_id for each in results if each.run.task_id == task] == ["0", "1", "2"]
    assert sorted((entry["task_id"], entry["run_id"]) for entry in service.entries) == sorted(
        (each.run.task_id, each.run.run_id) for each in results
    )
    assert not any("source" in entry for entry in service.entries), "it is the application's own word"


def test_a_reward_may_be_a_thumb_a_score_nothing_or_awaited(service: FeedbackService) -> None:
    score = Composite({"right": lambda reply: 1.0}, weights={"right": 2.0})(Reply(text=""))

    async def later() -> float:
        return 0.25

    rewards: list[Any] = [True, score, None, later()]
    with runner_of(service.url, reward_calculator=lambda result: rewards[result.call.args[0]], concurrency=1) as made:
        runner, _ = made
        for number in range(len(rewards)):
            runner.wrap(lambda number: number)(number)
    said = [(entry.get("metric", "reward"), entry.get("value", entry.get("reward"))) for entry in service.entries]
    assert said == [("reward", True), ("reward", 2.0), ("right", 1.0), ("reward", 0.25)]
    counts = runner.counters()
    assert (counts["rewarded"], counts["unrewarded"], counts["commits"], counts["feedback_sent"]) == (3, 1, 1, 4)


def test_marks_are_told_as_labels(service: FeedbackService) -> None:
    from tuneloop.runner import TrainingContext

    with runner_of(service.url) as (runner, _):
        TrainingContext.mark("hard", "paid")
        runner.wrap(str.upper)("a")
    assert [(each["metric"], each["value"]) for each in service.entries[1:]] == [
        ("mark:hard", "hard"),
        ("mark:paid", "paid"),
    ]


def test_a_share_of_the_calls_is_run_again(service: FeedbackService) -> None:
    draws = iter([0.05, 0.5, 0.099, 0.1, 0.9])
    with runner_of(service.url, SamplingRateStrategy(0.1, lambda: next(draws))) as (runner, results):
        for number in range(5):
            runner.wrap(str)(number)
    assert sorted(each.call.args[0] for each in results) == [0, 2]
    assert (runner.counters()["calls"], runner.counters()["selected"]) == (5, 2)
    assert sum(SamplingRateStrategy.of(0.1).should_select(ProductionCall(name="")) for _ in range(10_000)) < 2000
    for odd in (-0.1, 1.1):
        with pytest.raises(ValueError, match="share"):
            SamplingRateStrategy.of(odd)


def test_a_strategy_may_be_a_function_or_look_at_the_answer(service: FeedbackService) -> None:
    class Failures:
        after_call = True

        def should_select(self, call: ProductionCall) -> bool:
            return bool(call.result == "")

    for strategy in (lambda call: call.args == ("",), Failures()):
        with runner_of(service.url, strategy) as (runner, results):
            for text in ("a", "", "b"):
                runner.wrap(str.upper)(text)
        assert [each.call.args for each in results] == [("",)]
        assert (runner.counters()["calls"], runner.counters()["selected"]) == (3, 1)


async def exit_later(text: str) -> None:
    sys.exit(text)


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": fail}, "strategy_failed"),
    ({"agent": fail}, "shadow_failed"),
    ({"agent": lambda run: fail}, "shadow_failed"),
    ({"agent": lambda run: sys.exit}, "shadow_failed"),
    ({"agent": lambda run: exit_later}, "shadow_failed"),
    ({"reward_calculator": fail}, "reward_failed"),
    ({"reward_calculator": lambda result: float("nan")}, "feedback_failed"),
    ({"reward_calculator": lambda result: "good"}, "feedback_failed"),
    ({"capture": fail}, "dropped_not_copied"),
    ({"agent": lambda run: lambda text: time.sleep(0.5), "timeout_seconds": 0.05}, "shadow_timed_out"),
    ({"agent": lambda run: lambda text: asyncio.sleep(60), "timeout_seconds": 0.05}, "shadow_timed_out"),
    ({"reward_calculator": lambda result: asyncio.sleep(60), "timeout_seconds": 0.05}, "reward_failed"),
]


@pytest.mark.parametrize(("settings", "kind"), FAULTS)
def test_what_goes_wrong_is_counted_and_the_app_does_not_feel_it(
    service: FeedbackService, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], kind: str
) -> None:
    with caplog.at_level(logging.WARNING), runner_of(service.url, **settings) as (runner, _):
        started = time.monotonic()
        for text in "abc":
            assert runner.wrap(str.upper)(text) == text.upper()
        assert time.monotonic() - started < 0.4
    counts = runner.counters()
    assert (counts[kind], counts["rewarded"], counts["runner_failed"]) == (3, 0, 0)
    told = [each for each in caplog.records if each.message.startswith(kind)]
    assert len(told) == 1
    assert told[0].exc_info


def test_what_cannot_be_copied_is_not_run_again(service: FeedbackService) -> None:
    with runner_of(service.url) as (runner, results):
        assert runner.wrap(lambda lock: lock.locked())(threading.Lock()) is False
    assert results == []
    assert runner.counters()["dropped_not_copied"] == 1


def test_an_error_of_productions_is_the_apps_own(service: FeedbackService) -> None:
    async def fail_later() -> None:
        raise Broken

    with runner_of(service.url) as (runner, results):
        with pytest.raises(Broken):
            runner.wrap(fail)()
        with pytest.raises(Broken):
            asyncio.run(runner.wrap(fail_later)())
        assert runner.wrap(str.upper)("a") == "A"
    assert len(results) == 1


async def test_a_call_that_is_cancelled_is_not_run_again(service: FeedbackService) -> None:
    with runner_of(service.url) as (runner, results):
        task = asyncio.create_task(runner.wrap(asyncio.sleep)(60))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert results == []


def test_a_full_queue_drops_and_counts(service: FeedbackService) -> None:
    go_on = threading.Event()
    slow = {"agent": lambda run: lambda text: go_on.wait(30), "queue_size": 2, "concurrency": 1}
    with runner_of(service.url, **slow) as (runner, results):
        runner.wrap(str.upper)("a")
        eventually(lambda: runner.counters()["runs"] == 1)
        for text in "bcdef":
            runner.wrap(str.upper)(text)
        go_on.set()
    assert len(results) == 3
    assert runner.counters()["dropped_queue_full"] == 3


def test_hung_runs_are_never_more_than_their_places_and_the_app_can_end(service: FeedbackService) -> None:
    forever = threading.Event()
    hung = {"agent": lambda run: lambda text: forever.wait(), "concurrency": 2, "timeout_seconds": 0.05}
    threads = threading.active_count()
    with runner_of(service.url, **hung, patience_s=1) as (runner, _):
        for text in "abcdef":
            runner.wrap(str.upper)(text)
        eventually(lambda: runner.counters()["shadow_timed_out"] == 2)
        assert runner.counters()["runs"] == 2
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert runner.counters()["dropped_at_stop"] == 4
    forever.set()
    eventually(lambda: threading.active_count() <= threads)


def test_what_is_called_within_a_call_is_part_of_it(service: FeedbackService) -> None:
    with runner_of(service.url, agent=lambda run: outer_of(runner)) as (runner, results):
        assert outer_of(runner)("a") == "A!"
        eventually(lambda: runner.counters()["completed"] == 1)
    assert [each.result for each in results] == ["A!"]
    assert runner.counters()["calls"] == 1


def outer_of(runner: TrainingRunner) -> Callable[[str], str]:
    inner = runner.wrap(str.upper)
    return runner.wrap(lambda text: inner(text) + "!")


def test_before_its_start_and_after_its_end_nothing_is_run_again(service: FeedbackService) -> None:
    runner = TrainingRunner(service=service.url, model="t", agent=fail, reward_calculator=fail)
    ask = runner.wrap(str.upper)
    assert ask("a") == "A"
    assert runner.stop()
    with runner:
        pass
    assert ask("a") == "A"
    assert runner.counters()["calls"] == 0


ODD: list[dict[str, Any]] = [
    {"repeat_time": 0},
    {"concurrency": 0},
    {"queue_size": 0},
    {"timeout_seconds": 0},
    {"agent": None},
    {"queue": "calls"},
    {"service": "localhost:8010"},
    {"api_key": "secret\n"},
]


@pytest.mark.parametrize("odd", ODD)
def test_settings_that_make_no_sense_are_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own words
        TrainingRunner(**{"service": NOWHERE, "model": "t", "agent": fail, "reward_calculator": fail} | odd)


def test_a_function_that_yields_is_refused(service: FeedbackService) -> None:
    def pieces() -> Any:
        yield 1

    async def pieces_later() -> Any:
        yield 1

    with runner_of(service.url) as (runner, _):
        for each in (pieces, pieces_later):
            with pytest.raises(TypeError, match="yields"):
                runner.wrap(each)


def test_rewards_wait_for_a_service_that_is_away(service: FeedbackService, tmp_path: Path) -> None:
    service.answer = lambda body: (503, {}, "away")
    with runner_of(service.url, outbox=tmp_path, patience_s=1) as (runner, results):
        runner.wrap(str.upper)("a")
        eventually(lambda: len(service.calls) > 0)
        assert runner.stop(1) is False
    assert len(results) == 1
    assert runner.counters()["commits"] == 0
    service.calls.clear()
    service.answer = taken
    with runner_of(service.url, outbox=tmp_path):
        eventually(lambda: len(service.entries) == 1)


def test_commits_come_by_the_clock_and_only_where_something_is_new(service: FeedbackService) -> None:
    with runner_of(service.url, commit_interval_seconds=0.05) as (runner, _):
        runner.wrap(str.upper)("a")
        eventually(lambda: runner.counters()["commits"] == 1)
        time.sleep(0.2)
        assert runner.counters()["commits"] == 1
        runner.wrap(str.upper)("b")
        eventually(lambda: runner.counters()["commits"] == 2)


def run_alone(code: str, service: FeedbackService) -> None:
    """Run it in a process of its own, which must end well and complain of nothing."""
    done = subprocess.run(
        [sys.executable, "-c", code, service.url], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


_STARTED = """
import os, sys
from tuneloop.runner import EveryCall, TrainingRunner
runner = TrainingRunner(
    service=sys.argv[1], model="t", agent=lambda run: str.upper, reward_calculator=lambda result: 1.0,
    selection_strategy=EveryCall(), commit_interval_seconds=0,
)
runner.start()
ask = runner.wrap(str.upper)
"""


def test_a_forked_child_leaves_shadow_runs_to_its_parent(service: FeedbackService) -> None:
    code = """
pid = os.fork()
if not pid:
    os._exit(0 if ask("child") == "CHILD" else 1)
assert os.waitpid(pid, 0)[1] == 0
assert ask("parent") == "PARENT"
assert runner.stop()
assert runner.counters()["rewarded"] == 1, runner.counters()
"""
    run_alone(_STARTED + code, service)


def test_a_forked_child_may_start_and_stop_for_itself(service: FeedbackService) -> None:
    code = """
ask("parent")
def in_child(act):
    if not (pid := os.fork()):
        os._exit(0 if act() else 1)
    assert os.waitpid(pid, 0)[1] == 0
def start_and_stop():
    runner.start()
    ask("child")
    return runner.stop() and runner.counters()["rewarded"] == 1
in_child(runner.stop)
in_child(start_and_stop)
assert os.path.isdir(runner._temporary)
ask("parent")
assert runner.stop()
assert runner.counters()["rewarded"] == 2, runner.counters()
"""
    run_alone(_STARTED + code, service)
    assert len(service.entries) == 3


def test_an_app_that_forgets_to_stop_it_ends(service: FeedbackService) -> None:
    code = """
import sys, time
from tuneloop.runner import EveryCall, TrainingRunner
runner = TrainingRunner(
    service=sys.argv[1], model="t", agent=lambda run: lambda text: time.sleep(600), reward_calculator=str,
    selection_strategy=EveryCall(),
)
runner.start()
runner.wrap(str.upper)("a")
time.sleep(0.2)
"""
    run_alone(code, service)


def test_a_call_takes_no_millisecond_longer(service: FeedbackService) -> None:
    def times(call: Callable[[list[str]], int]) -> list[float]:
        found = []
        for _ in range(100):
            started = time.perf_counter()
            call(["text"] * 20)
            found.append(time.perf_counter() - started)
        return sorted(found)

    with runner_of(service.url) as (runner, _):
        bare, wrapped = times(len), times(runner.wrap(len))
    assert wrapped[50] - bare[50] < 0.001


def test_a_run_binds_any_client(service: FeedbackService) -> None:
    runs: list[ShadowRun] = []
    keyed = {"agent": lambda run: runs.append(run) or str.upper, "api_key": "secret"}
    with runner_of(f"{service.url}/v1", **keyed) as (runner, _):
        runner.wrap(str.upper)("a")
    [run] = runs
    assert run.base_url == f"{service.url}/run/{run.token}/v1"
    assert (run.api_key, run.model, os.environ.get("OPENAI_API_KEY")) == ("secret", "t", None)
    model = run.chat_model("async_openai")
    assert str(model.base_url).startswith(run.base_url)
