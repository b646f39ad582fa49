"""The tasks' agent against a server that replies as the teacher does."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, NamedTuple

import pytest

from examples.tasks.calculator import Calculator
from examples.tasks.dialogue import Task
from examples.tasks.drive import Agent
from examples.tasks.rating import Rater
from examples.tasks.sums import Sums
from examples.tasks.tools import Shop
from tuneloop.shared.experience import State

TRUE = Rater(low=0.0, high=1.0)


class Server(ThreadingHTTPServer):
    """Replies rightly, and remembers what it was asked and told."""

    task: Task
    fails = False
    #: How many commits are answered "come again".
    behind = 0
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ids = count(1)
        self.asked: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def reply(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        messages = asked["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        question = next(q for q in self.task.questions() if next(self.task.dialogue(q)) == messages[:1])
        said = list(self.task.replies(question, None))[turn].message
        choice = {"index": 0, "finish_reason": "stop", "message": said}
        return {
            "id": f"id{next(self.ids)}",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
        }


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said: dict[str, Any] = {"status": "success"}
        if self.path == "/v1/chat/completions":
            said = self.server.reply(body)
        elif self.path == "/feedback":
            self.server.told.append(body)
        text = json.dumps(said).encode()
        status = 500 if self.server.fails else 200
        if self.path == "/commit" and self.server.behind:
            self.server.behind -= 1
            status = 503
        self.send_response(status)
        self.send_header("retry-after", "0")
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        return None


class Version(NamedTuple):
    step: int


class LedgerDouble:
    """A trainer that takes what is there at once; it makes no steps. So many replies wait for a commit at first."""

    def __init__(self, rewarded: int = 0) -> None:
        self.rewarded = rewarded
        self.versions = self.reports = self

    def newest(self) -> Version:
        return Version(0)

    def counts(self) -> Counter[State]:
        self.rewarded -= 1
        return Counter({State.REWARDED: max(0, self.rewarded + 1)})


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def driven(
    server: Server, task: Task, *, runs: int, most: int, demonstrate: bool = False, rewarded: int = 0
) -> Agent:
    server.task, ledger = task, LedgerDouble(rewarded)
    async with Agent(server.url, task, TRUE, runs=runs, most=most, demonstrate=demonstrate) as agent:
        await agent.drive(ledger, seed=0, until_step=10, ahead=10**6)  # type: ignore[arg-type]
    return agent


async def test_each_question_is_played_in_groups_and_each_run_is_rated_once(server: Server) -> None:
    agent = await driven(server, Sums(), runs=4, most=24)
    assert len(agent.judged) == len(server.asked) == len(server.told) == 24
    assert agent.requests.failed == 0
    assert {told["reward"] for told in server.told} == {1.0}
    assert set(Counter(told["task_id"] for told in server.told).values()) == {4}
    labels = {(asked["metadata"]["task_id"], asked["metadata"]["run_id"]) for asked in server.asked}
    assert labels == {(told["task_id"], told["run_id"]) for told in server.told}
    assert len(labels) == 24


async def test_one_feedback_names_all_calls_of_a_run(server: Server) -> None:
    agent = await driven(server, Calculator(), runs=1, most=5)
    assert all(verdict.right for verdict in agent.judged)
    assert [len(told["msg_ids"]) for told in server.told] == [3] * 5
    assert len({msg_id for told in server.told for msg_id in told["msg_ids"]}) == len(server.asked) == 15
    assert server.asked[0]["tools"][0]["function"]["name"] == "calc"
    longest = max((asked["messages"] for asked in server.asked), key=len)
    assert [message["role"] for message in longest] == ["user", "assistant", "tool", "assistant", "tool"]


async def test_a_demonstration_is_the_right_reply(server: Server) -> None:
    await driven(server, Sums(), runs=1, most=3, demonstrate=True)
    sums = {asked["metadata"]["task_id"]: asked["messages"][0]["content"] for asked in server.asked}
    for told in server.told:
        left, right = sums[told["task_id"]].rstrip("=").split("+")
        assert told["demonstration"] == str(int(left) + int(right))


async def test_measuring_gives_no_feedback_and_is_kept_out_of_training(server: Server) -> None:
    server.task = Shop()
    async with Agent(server.url, Shop(), TRUE, runs=1, most=0) as agent:
        assert await agent.measure(40, seed=1) == 1.0
    assert not server.told
    assert {asked["metadata"]["train"] for asked in server.asked} == {"false"}


async def test_a_failed_request_is_counted_and_ends_its_run_alone(server: Server) -> None:
    server.fails = True
    agent = await driven(server, Sums(), runs=1, most=6)
    assert (agent.requests.made, agent.requests.failed) == (6, 6)
    assert "500" in agent.requests.last_failure
    assert not agent.judged


async def test_a_commit_that_is_put_off_is_made_again(server: Server) -> None:
    server.behind = 2
    agent = await driven(server, Sums(), runs=1, most=6, rewarded=3)
    assert (agent.requests.put_off, agent.requests.failed) == (2, 0)
