"""Requests below /run/<token>/ belong to the run that the token names."""

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tuneloop.explorer.auth import RunBinding, binding_of
from tuneloop.runner.models.run import Run
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import MAX_NAME, Exchange

pytestmark = pytest.mark.contract

ASKED = {"model": MODEL, "max_tokens": 12}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": HELLO,
    "responses": ASKED | {"input": "3+4="},
    "messages": ASKED | {"messages": HELLO["messages"]},
}


def written(labels: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(labels).encode()).decode()


def bound(explorer: RunningExplorer, **but: Any) -> str:
    return Run(**{"service": explorer.url, "task_id": "t1", "run_id": "r1"} | but).base_url


def labels_of(kept: Exchange) -> tuple[str | None, str | None, str | None]:
    return kept.task_id, kept.run_id, kept.experiences[0].drop_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_every_route_that_samples_labels_its_reply_by_the_path(
    explorer: RunningExplorer, route: str, stream: bool
) -> None:
    for train in (True, False):
        reply = httpx.post(f"{bound(explorer, train=train)}/{route}", json=BODIES[route] | {"stream": stream})
        assert reply.status_code == 200
        eventually(lambda train=train: len(explorer.exchanges()) == (1 if train else 2))
    assert [labels_of(each) for each in explorer.exchanges()] == [("t1", "r1", None), ("t1", "r1", "opt_out")]


def test_a_text_completion_below_a_run_is_one_of_the_run(explorer: RunningExplorer, double: EngineDouble) -> None:
    body = ASKED | {"prompt": [1, 2], "max_tokens": 2}
    whole = explorer.http.post("/v1/completions", json=body).status_code
    assert httpx.post(f"{bound(explorer)}/completions", json=body).status_code == whole
    assert [each.run_id for each in explorer.exchanges()][1:] == ["r1"] * (len(explorer.exchanges()) - 1)


def test_the_path_wins_over_the_body_but_leaves_it_what_it_does_not_say(explorer: RunningExplorer) -> None:
    metadata = {"task_id": "other", "tuneloop_run_id": "other", "train": False, "user": "ann"}
    httpx.post(f"{bound(explorer)}/chat/completions", json=HELLO | {"metadata": metadata}).raise_for_status()
    kept = explorer.exchanges()[-1]
    assert (*labels_of(kept), kept.user) == ("t1", "r1", "opt_out", "ann")
    token = written({"task_id": "t", "run_id": 7, "train": True})
    explorer.http.post(f"/run/{token}/v1/chat/completions", json=HELLO | {"metadata": metadata}).raise_for_status()
    assert labels_of(explorer.exchanges()[-1]) == ("t", "7", "opt_out")  # whoever opts out is heard


def test_what_samples_nothing_is_there_below_a_run_too(explorer: RunningExplorer) -> None:
    root = bound(explorer).removesuffix("/v1")
    assert httpx.get(f"{root}/v1/models").json() == explorer.http.get("/v1/models").json()
    tokenized = {"model": MODEL, "prompt": "3+4="}
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        assert httpx.post(f"{root}{path}", json=tokenized).json() == explorer.http.post(path, json=tokenized).json()
    assert httpx.get(f"{root}/v1/models").headers["x-request-id"]


def test_nothing_but_the_model_is_below_a_run(explorer: RunningExplorer) -> None:
    root = bound(explorer).removesuffix("/v1")
    for path in ("/metrics", "/health", "/admin/versions", "", "/"):
        assert httpx.get(f"{root}{path}").status_code == 404
    assert httpx.post(f"{root}/commit", json={}).status_code == 404


BROKEN = {
    "%21%21": "URL-safe base64",
    "a": "URL-safe base64",
    base64.urlsafe_b64encode(b"\xff\xfe").decode(): "URL-safe base64",
    base64.urlsafe_b64encode(b"x" * 300).decode(): "URL-safe base64",
    written([1]): "URL-safe base64 of a JSON object",
    written({"task_id": "t"}): "run_id is missing",
    written({"run_id": "t", "task_id": None}): "task_id is missing",
    written({"task_id": "t", "run_id": 1.5}): "run_id must be a string or an integer",
    written({"task_id": "x" * (MAX_NAME + 1), "run_id": "0"}): "at most",
    written({"task_id": "t", "run_id": "0", "train": "no"}): "train in its token must be a boolean",
    written({"task_id": "t", "run_id": "0", "reward": 1}): "unknown field 'reward'",
}


@pytest.mark.parametrize("token", BROKEN)
def test_a_broken_token_is_refused_with_the_reason(explorer: RunningExplorer, token: str) -> None:
    for method, path in (("POST", "chat/completions"), ("GET", "models"), ("POST", "responses")):
        reply = explorer.http.request(method, f"/run/{token}/v1/{path}", json=BODIES.get(path, {}))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["type"]) == (400, "invalid_run_token", "invalid_request_error")
        assert BROKEN[token] in error["message"]
        assert reply.headers["x-request-id"]
    reply = explorer.http.post(f"/run/{token}/v1/messages", json=BODIES["messages"])
    assert (reply.status_code, reply.json()["type"]) == (400, "error")
    assert BROKEN[token] in reply.json()["error"]["message"]
    assert explorer.exchanges() == []


@given(st.text(min_size=1, max_size=30).filter(lambda name: "\0" not in name), st.booleans())
def test_the_runners_tokens_say_what_they_were_made_of(name: str, train: bool) -> None:
    run = Run(service="http://there", task_id=name, run_id=name[::-1], train=train)
    assert binding_of({"tuneloop.run_token": run.token}) == RunBinding(name, name[::-1], None if train else False)


@given(st.text(max_size=30))
def test_any_other_token_is_refused_and_nothing_else_happens(token: str) -> None:
    with pytest.raises(RequestRefused):
        binding_of({"tuneloop.run_token": token})


def test_a_hundred_runs_at_once_each_get_their_own_calls(explorer: RunningExplorer) -> None:
    async def call_three_times(client: httpx.AsyncClient, number: int) -> None:
        base = bound(explorer, task_id=f"task {number % 10}", run_id=str(number))
        for turn in range(3):
            body = HELLO | {"stream": bool(turn % 2), "user": f"run {number}"}
            (await client.post(f"{base}/chat/completions", json=body)).raise_for_status()

    async def call_all() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await asyncio.gather(*(call_three_times(client, number) for number in range(100)))

    asyncio.run(call_all())
    eventually(lambda: len(explorer.exchanges()) == 300)
    for each in explorer.exchanges():
        assert (each.user, each.task_id) == (f"run {each.run_id}", f"task {int(each.run_id or 0) % 10}")
