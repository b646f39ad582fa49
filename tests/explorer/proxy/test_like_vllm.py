"""What vLLM accepts is accepted here, and means the same."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.doubles.engine import CHAT, MODEL, EngineDouble, EnginePlace
from tests.explorer.conftest import Run
from tests.explorer.dialects.test_dialects import IDS, PROMPT, TEXT, tell
from tests.explorer.running import HELLO, RunningExplorer
from tuneloop.shared.experience import State

pytestmark = pytest.mark.contract

TRUE = (1, 1.0, "true", "True", "on", "yes", "1")
FALSE = (0, 0.0, "false", "OFF", "n", "0")
BODY = json.dumps(HELLO | {"user": "Zo\xeb"}, ensure_ascii=False)


def sampled(explorer: RunningExplorer) -> list[Any]:
    """Whether each choice that was stored is a sample of the policy."""
    return [each.unsampled or each.drop_reason for kept in explorer.exchanges() for each in kept.experiences]


@pytest.mark.parametrize("value", TRUE)
def test_what_stands_for_true_is_true(explorer: RunningExplorer, double: EngineDouble, value: object) -> None:
    reply = explorer.chat(stream=value)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    [choice] = explorer.chat(logprobs=value).json()["choices"]
    assert choice["logprobs"]["content"]
    assert choice["token_ids"] is None
    [choice] = explorer.chat(return_token_ids=value).json()["choices"]
    assert choice["token_ids"]
    assert sampled(explorer) == [None] * 3


@pytest.mark.parametrize("value", FALSE)
def test_what_stands_for_false_is_false(explorer: RunningExplorer, value: object) -> None:
    reply = explorer.chat(stream=value, logprobs=value, return_token_ids=value)
    [choice] = reply.json()["choices"]
    assert (choice["logprobs"], choice["token_ids"]) == (None, None)
    assert sampled(explorer) == [None]


@pytest.mark.parametrize("value", ["1", 1.0, True, "1.0", None])
def test_what_stands_for_a_number_of_choices_is_one(explorer: RunningExplorer, value: object) -> None:
    reply = explorer.chat(n=value)
    assert reply.status_code == 200
    assert explorer.feedback(f"{reply.json()['id']}:0").json()["accepted"] == 1


@pytest.mark.parametrize(
    "neutral", [{"top_p": "1"}, {"top_k": "-1"}, {"min_p": "0.0"}, {"ignore_eos": "false"}, {"temperature": "1.0"}]
)
def test_what_changes_nothing_as_a_string_is_still_a_sample_of_the_policy(
    explorer: RunningExplorer, neutral: dict[str, Any]
) -> None:
    assert explorer.chat(**neutral).status_code == 200
    assert sampled(explorer) == [None]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_a_body_may_come_in_every_encoding_of_unicode(
    explorer: RunningExplorer, double: EngineDouble, encoding: str
) -> None:
    reply = explorer.http.post(CHAT, content=BODY.encode(encoding))
    assert reply.status_code == 200
    assert double.chats[-1].body["user"] == "Zo\xeb"
    [kept] = explorer.exchanges()
    assert (kept.user, json.loads(kept.request)) == ("Zo\xeb", json.loads(BODY))
    answer = explorer.http.post(
        "/feedback", content=json.dumps({"msg_ids": [kept.msg_id], "reward": 1}).encode(encoding)
    )
    assert answer.json()["accepted"] == 1


@dataclass
class Evaluated(EngineDouble):
    """A double that completes as many prompts as it is sent."""

    async def _answer(self, scope: Any, body: bytes, send: Any) -> None:
        if scope["path"] != TEXT or (request := json.loads(body)).get("top_k") == 1:
            return await super()._answer(scope, body, send)
        choice = {"text": "7!", "finish_reason": "length", "token_ids": IDS, "prompt_token_ids": PROMPT}
        choice["logprobs"] = {"token_logprobs": [-0.5] * len(IDS), "tokens": ["x"] * len(IDS)}
        choices = [{"index": number, **choice} for number in range(len(request["prompt"]) * int(request.get("n", 1)))]
        name = "cmpl-" + dict(scope["headers"])[b"x-request-id"].decode()
        await tell(send, 200, json.dumps({"id": name, "model": MODEL, "choices": choices}).encode())


@pytest.mark.parametrize(("prompts", "n"), [(130, 1), (150, 2)])
def test_an_evaluation_of_many_prompts_is_answered_and_every_choice_takes_feedback(
    running_explorer: Run, places: list[EnginePlace], prompts: int, n: int
) -> None:
    places[0].double = Evaluated(url=places[0].url)
    explorer = running_explorer(places[0].double)
    reply = explorer.http.post(TEXT, json={"model": MODEL, "prompt": ["3+4="] * prompts, "n": n, "max_tokens": 3})
    assert len(reply.json()["choices"]) == prompts * n
    msg_id, last = reply.json()["id"], prompts * n - 1
    assert explorer.counts()[State.RECORDED] == prompts * n
    assert explorer.feedback(f"{msg_id}:{last}").json()["accepted"] == 1
    assert explorer.feedback(f"{msg_id}:{last + 1}").status_code == 404
    assert explorer.counts()[State.REWARDED] == 1


@pytest.mark.parametrize("value", ["12", 12.0])
def test_a_response_shows_what_its_numbers_were_taken_for(explorer: RunningExplorer, value: object) -> None:
    asked = {"model": MODEL, "input": "3+4=", "max_output_tokens": value, "background": "false", "stream": "no"}
    reply = explorer.http.post("/v1/responses", json=asked)
    assert (reply.status_code, reply.json()["max_output_tokens"]) == (200, 12)
    explorer.until_flushed()
    assert explorer.http.get(f"/v1/responses/{reply.json()['id']}").json()["max_output_tokens"] == 12


def test_an_ordinary_users_metadata_is_his_own(explorer: RunningExplorer) -> None:
    for metadata in ("a word", 5, [1], {"priority": "high", "task_id": {"a": 1}}):
        assert explorer.chat(metadata=metadata).status_code == 200
    assert explorer.rows("SELECT DISTINCT task_id FROM experiences") == [(None,)]
    assert (
        explorer.chat(metadata={"tuneloop_priority": "high"}).json()["error"]["param"] == "metadata.tuneloop_priority"
    )
