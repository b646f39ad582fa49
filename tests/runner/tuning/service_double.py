"""A service in miniature: replies, feedback, commits and versions, all in memory, and everything that was asked of it.

`python -m tests.runner.tuning.service_double PORT` runs one as a process.
"""

import asyncio
import base64
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

Json = dict[str, Any]
Run = tuple[str, str]

MODEL = "double"


def knows_more_with_every_version(question: str, version: int, call: int) -> str:
    """The right answer to a sum in `version` of 10 calls."""
    left, _, right = question.partition("+")
    return str(int(left) + int(right)) if call % 10 < version else "I do not know."


@dataclass
class ServiceDouble:
    """An ASGI app that answers as the explorer does."""

    answer: Callable[[str, int, int], str] = knows_more_with_every_version
    train_s: float = 0.01
    #: Seconds that a reply takes.
    reply_s: float = 0.0
    #: Every request is answered with 503.
    away: bool = False
    #: Committed experiences make no version.
    learns_nothing: bool = False
    #: So many commits are done, and answered with 503.
    lost_answers: int = 0
    trainer_up: bool = True
    #: Why the newest version is not served.
    held: str = ""
    #: How it says that it trains; one that is older than that says nothing.
    configured: Json | None = None
    #: Events of one run in one call, and events kept of one run.
    most_in_a_call: int = 100
    most_of_a_run: int = 250

    version: int = 0
    calls: dict[Run, list[Json]] = field(default_factory=lambda: defaultdict(list))
    events: dict[tuple[str, str, str], float] = field(default_factory=dict)
    #: Feedback that was new, and feedback that repeated a key.
    accepted: int = 0
    duplicates: int = 0
    keys: set[tuple[str, str]] = field(default_factory=set)
    committed: set[Run] = field(default_factory=set)
    commits: list[Json] = field(default_factory=list)
    #: Requests that were bound to no run.
    unbound: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    _training: int = 0
    _tasks: set[Any] = field(default_factory=set)

    @property
    def rewards(self) -> dict[Run, float]:
        """What each run was rewarded with."""
        return {(task, run): value for (task, run, metric), value in self.events.items() if metric == "reward"}

    async def __call__(self, scope: Json, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await _live(receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers: list[tuple[bytes, bytes]] = []
        if self.away:
            status, said = 503, {"error": {"message": "away"}}
        else:
            path, query = scope["raw_path"].decode(), dict(parse_qsl(scope["query_string"].decode()))
            status, said = await self._answer(path, query, json.loads(body) if body else {})
            headers = [(b"x-tuneloop-version", str(self.version).encode())]
        headers.append((b"content-type", b"application/json"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})

    async def _answer(self, path: str, query: dict[str, str], body: Json) -> tuple[int, Any]:
        if path.startswith("/run/") and path.endswith("/v1/chat/completions"):
            return await self._reply(_labels(path.split("/")[2]), body)
        if path == "/v1/chat/completions":
            self.unbound += 1
            return await self._reply({"task_id": "", "run_id": ""}, body)
        match path:
            case "/training/calls":
                return 200, _counts(len(self.calls.get((query["task_id"], query["run_id"]), ())))
            case "/feedback":
                return self._feedback(body["feedback"])
            case "/commit":
                said = self._commit(body)
                self.lost_answers -= 1
                return (200, said) if self.lost_answers < 0 else (503, {"error": {"message": "lost"}})
            case "/training":
                return 200, self._status()
            case "/health/ready":
                return 200, {"status": "ready"}
            case "/v1/models":
                return 200, {"data": [{"id": MODEL}]}
            case "/state":
                return 200, self.state()
        return 404, {"error": {"message": f"no route {path}"}}

    async def _reply(self, labels: Json, body: Json) -> tuple[int, Any]:
        if body["model"] != MODEL:
            # As an engine says it, which has the last word on names.
            message = f"The model `{body['model']}` does not exist. Valid aliases: {MODEL}."
            return 404, {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.reply_s)
        self.in_flight -= 1
        run = labels["task_id"], labels["run_id"]
        number = sum(map(len, self.calls.values()))
        self.calls[run].append({"train": labels.get("train", True), "version": self.version, **body})
        text = self.answer(body["messages"][-1]["content"], self.version, number)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        reply = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "model": MODEL}
        return 200, reply | {"choices": [choice], "usage": usage}

    def _feedback(self, entries: list[Json]) -> tuple[int, Json]:
        outcomes = {}
        about = Counter((entry["task_id"], entry["run_id"]) for entry in entries)
        if max(about.values()) > self.most_in_a_call:
            return 413, {"error": {"message": "a run gets more than 100 events", "code": "too_many_events"}}
        for entry in entries:
            run = entry["task_id"], entry["run_id"]
            if sum(known[:2] == run for known in self.events) >= self.most_of_a_run:
                outcomes["/".join(run)] = "full"
                continue
            metric, value = ("reward", entry["reward"]) if "reward" in entry else (entry["metric"], entry["value"])
            if (key := (entry["idempotency_key"], metric)) in self.keys:
                self.duplicates += 1
                continue
            self.keys.add(key)
            self.accepted += 1
            self.events[*run, metric] = value
            outcomes["/".join(run)] = "accepted" if run in self.calls else "pending"
        return 200, {"status": "success", "outcomes": outcomes}

    def _commit(self, body: Json) -> Json:
        self.commits.append(body)
        new = {
            run for run in self.rewards if run in self.calls and run[0] in body.get("task_ids", [run[0]])
        } - self.committed
        self.committed |= new
        if new:
            self._training += 1
            task = asyncio.get_running_loop().create_task(self._train())
            self._tasks.add(task)
        return {"status": "success", "committed": sum(len(self.calls[run]) for run in new)}

    async def _train(self) -> None:
        await asyncio.sleep(self.train_s)
        await self._trainer()
        self.version += not self.learns_nothing
        self._training -= 1

    async def _trainer(self) -> None:
        while not self.trainer_up:  # noqa: ASYNC110 - tests set it from other threads
            await asyncio.sleep(0.01)

    def _status(self) -> Json:
        return {
            "served": max(self.version - bool(self.held), 0),
            "newest": self.version,
            "step": self.version,
            "settled": not self._training and not self.held,
            "experiences": {"committed": self._training},
            "reasons": [{"code": "promotion_held", "sentence": self.held}]
            if self.held
            else [{"code": "nothing_recorded", "sentence": "no experience was recorded"}],
            "trainer_up": self.trainer_up,
            **({"configured": self.configured} if self.configured else {}),
        }

    def state(self) -> Json:
        """What a test in another process wants to know."""
        return {
            "rewards": [[*run, reward] for run, reward in self.rewards.items()],
            "committed": sorted(self.committed),
            "calls": [[*run, len(calls)] for run, calls in self.calls.items()],
            "accepted": self.accepted,
            "version": self.version,
        }


def _counts(calls: int) -> Json:
    tokens = 5 * calls
    return {
        "calls": calls,
        "tokens": tokens,
        "completion_tokens": 2 * calls,
        "sequences": calls,
        "merged_tokens": tokens,
    }


def _labels(token: str) -> Json:
    labels: Json = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    return labels


async def _live(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


if __name__ == "__main__":
    import uvicorn

    double = ServiceDouble(reply_s=0.0 if "--prompt" in sys.argv else 0.005)
    uvicorn.run(double, port=int(sys.argv[1]), log_level="critical")
