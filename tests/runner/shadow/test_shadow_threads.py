"""Tools that are bound to a shadow run: in whatever thread it calls them, nothing is written."""

import json
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.runner.feedback.service import FeedbackService
from tests.runner.shadow.recording import runner_of
from tuneloop.runner import ShadowResult, ShadowRun, TrainingRunner


class Post:
    """A tool that writes, and what it wrote."""

    def __init__(self, runner: TrainingRunner) -> None:
        self.sent: list[str] = []
        self.send = runner.tools.tool(self._send, name="send")

    def _send(self, what: str) -> str:
        self.sent.append(what)
        return f"sent {what}"


@pytest.fixture
def errands() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Has something done by a thread that nobody's context reaches."""
    waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()

    def work() -> None:
        while (errand := waiting.get()) is not None:
            do, future = errand
            future.set_result(do())

    def have_done(do: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        waiting.put((do, future))
        return future.result(30)

    thread = threading.Thread(target=work)
    thread.start()
    yield have_done
    waiting.put(None)
    thread.join()


def rehearsed(service: FeedbackService, agent: Callable[[ShadowRun, Post], Any]) -> tuple[Post, ShadowResult]:
    with runner_of(service.url) as (runner, results):
        post = Post(runner)
        runner.tools.tool(lambda what: post.send(what), read_only=True, name="sly")
        runner.wrap(lambda: post.send("known"), agent=lambda run: lambda: agent(run, post))()
    assert len(results) == 1, runner.counters()
    return post, results[0]


def test_tools_bound_to_the_run_write_nothing_in_any_thread(
    service: FeedbackService, errands: Callable[[Callable[[], Any]], Any]
) -> None:
    post, result = rehearsed(
        service,
        lambda run, post: [
            errands(lambda: run.tools["send"]("known")),
            errands(lambda: run.tools.call("send", {"what": "other"})),
            errands(lambda: run.tools["sly"]("below")),
        ],
    )
    assert post.sent == ["known"]
    assert result.result[0] == "sent known"
    assert [each.outcome for each in result.tool_calls] == ["recorded", "refused", "ran", "refused"]


def test_a_call_of_a_tool_that_is_not_registered_is_refused_with_a_result_that_says_so(
    service: FeedbackService,
) -> None:
    def ask(run: ShadowRun, post: Post) -> Any:
        assert (sorted(run.tools), len(run.tools)) == (["send", "sly"], 2)
        assert ("send" in run.tools, "delete" in run.tools) == (True, False)
        return [run.tools.call("delete", {"number": 7}), run.tools["delete"](7)]

    _, result = rehearsed(service, ask)
    refused = [json.loads(each) for each in result.result]
    assert [each["tool"] for each in refused] == ["delete", "delete"]
    assert "was not run" in refused[0]["error"]
    assert refused[0]["arguments"] == {"number": 7}
    assert [each.outcome for each in result.tool_calls] == ["refused", "refused"]


def test_the_error_that_a_shadow_run_meets_is_not_productions_own(service: FeedbackService) -> None:
    """Production may still have to log its own, with where it came from."""
    raised: list[Exception] = []
    met: list[Exception] = []

    def attempt(into: list[Exception], buy: Callable[[], None]) -> None:
        try:
            buy()
        except LookupError as error:
            into.append(error)

    with runner_of(service.url, repeat_time=2) as (runner, _):

        @runner.tools.tool
        def buy() -> None:
            raise LookupError("gone")

        runner.wrap(lambda: attempt(raised, buy), agent=lambda run: lambda: attempt(met, buy))()
    assert [(type(each), str(each)) for each in met] == [(LookupError, "gone")] * 2
    assert len({id(each) for each in [*raised, *met]}) == 3
    assert traceback.extract_tb(raised[0].__traceback__)[-1].name == "buy"
