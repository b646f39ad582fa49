"""Stored completions over the wire: with OpenAI's own client, and as bare HTTP."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.doubles.engine import MODEL, EngineDouble, engine_place
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tests.factories import exchange, experience
from tests.house.documents.page_files import python_of
from tuneloop.explorer.http.lists import DEFAULT_LIMIT, MAX_LIMIT
from tuneloop.shared.errors import LedgerUnavailable
from tuneloop.shared.experience import Exchange, State
from tuneloop.shared.ledger.ledger import BatchRules
from tuneloop.shared.ledger.recording.stored_completions import MAX_EXAMINED

pytestmark = pytest.mark.contract

CHAT = "/v1/chat/completions"
MANY = 250
SAID = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExplorer]:
    """An explorer whose ledger has MANY exchanges, every fifth labelled, with an engine address of its own."""
    folder = tmp_path_factory.mktemp("many")
    with engine_place() as place, explorer_running(settings_for(folder, [place.fresh().url])) as running:
        running.ledger.recording.record([imported(number) for number in range(MANY)])
        yield running


def imported(number: int) -> Exchange:
    metadata = {"number": str(number)} | ({"fifth": "yes"} if number % 5 == 0 else {})
    body = {"model": MODEL if number % 2 else "other", "messages": SAID, "metadata": metadata, "user": "ann"}
    return exchange(
        msg_id=f"chatcmpl-{number:03}",
        tenant="default",
        request=json.dumps(body).encode(),
        received_at=1000.0 + number // 3,  # three of one moment
        experiences=(experience(), experience(choice=1)),
    )


def recorded_order(count: int = MANY) -> list[str]:
    return [f"chatcmpl-{number:03}" for number in range(count)]


def error(answer: httpx.Response) -> tuple[int, Any, Any]:
    response = answer.json()["error"]
    assert response.keys() == {"message", "type", "param", "code"}
    return answer.status_code, response["param"], response["code"]


# OpenAI's client.


@pytest.mark.parametrize("limit", [None, 1, 7, 100])
def test_a_client_turns_all_the_pages(many: RunningExplorer, limit: int | None) -> None:
    client = many.openai()
    if limit == 1:
        found = client.chat.completions.list(limit=1)
        assert [each.id for each, _ in zip(found, range(5), strict=False)] == recorded_order(5)
        return
    how: Any = {} if limit is None else {"limit": limit}
    assert [each.id for each in client.chat.completions.list(**how)] == recorded_order()
    backwards = client.chat.completions.list(order="desc", **how)
    assert [each.id for each in backwards] == recorded_order()[::-1]


async def test_a_client_without_threads_turns_them_too(many: RunningExplorer) -> None:
    async with many.openai_async() as client:
        found = [each async for each in client.chat.completions.list(limit=60)]
        assert [each.id for each in found] == recorded_order()
        reply = [each async for each in client.chat.completions.messages.list("chatcmpl-000", limit=1)]
        assert [each.content for each in reply] == ["Add.", "3+4="]


def test_a_client_finds_by_model_and_metadata(many: RunningExplorer) -> None:
    completions = many.openai().chat.completions
    odd = [each.id for each in completions.list(model=MODEL, limit=50)]
    assert odd == recorded_order()[1::2]
    assert [each.id for each in completions.list(metadata={"fifth": "yes"})] == recorded_order()[::5]
    assert [each.id for each in completions.list(metadata={"fifth": "yes", "number": "10"})] == ["chatcmpl-010"]
    both = completions.list(model=MODEL, metadata={"fifth": "yes"}, order="desc", limit=3)
    assert [each.id for each in both] == recorded_order()[5::10][::-1]
    assert list(completions.list(model="none")) == list(completions.list(metadata={"fifth": "no"})) == []


def test_a_client_sees_what_it_was_answered(explorer: RunningExplorer) -> None:
    client = explorer.openai()
    reply: Any = {"messages": SAID, "model": MODEL, "max_tokens": 12, "user": "ann", "temperature": 0.5, "n": 2}
    answered = client.chat.completions.create(**reply, metadata={"task_id": "t"})
    kept = client.chat.completions.retrieve(answered.id)
    assert isinstance(kept, ChatCompletion)
    assert [each.message.content for each in kept.choices] == [each.message.content for each in answered.choices]
    assert [each.finish_reason for each in kept.choices] == [each.finish_reason for each in answered.choices]
    assert (kept.id, kept.model, kept.object) == (answered.id, MODEL, "chat.completion")
    assert kept.usage is not None
    assert answered.usage is not None
    assert kept.usage.total_tokens == answered.usage.total_tokens
    assert kept.usage.prompt_tokens == answered.usage.prompt_tokens
    assert abs(kept.created - time.time()) < 60
    more: dict[str, Any] = kept.model_extra or {}
    assert (more["temperature"], more["input_user"], kept.metadata) == (0.5, "ann", {"task_id": "t"})
    [listed] = client.chat.completions.list()
    assert listed == kept
    messages = client.chat.completions.messages.list(answered.id).data
    assert [(each.id, each.role, each.content) for each in messages] == [
        (f"{answered.id}-0", "system", "Add."),
        (f"{answered.id}-1", "user", "3+4="),
    ]


def test_a_streamed_reply_with_tools_is_kept_like_a_whole_one(explorer: RunningExplorer) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    choice = {"type": "function", "function": {"name": "add"}}
    client = explorer.openai()
    for stream in (False, True):
        reply = explorer.chat(tools=tools, tool_choice=choice, stream=stream)
        assert reply.status_code == 200
    [whole, streamed] = client.chat.completions.list()
    assert whole.choices[0].message.tool_calls
    assert whole.choices[0].message.content is None
    calls = [each.choices[0].message.tool_calls or [] for each in (whole, streamed)]
    assert [[call.type for call in each] for each in calls] == [["function"]] * 2
    assert (whole.model_extra or {})["tools"] == tools
    assert (whole.model_extra or {})["tool_choice"] == choice


def test_a_client_changes_metadata(explorer: RunningExplorer) -> None:
    client = explorer.openai()
    msg_id = explorer.chat(metadata={"task_id": "t", "run_id": 3, "old": "1"}).json()["id"]
    changed = client.chat.completions.update(msg_id, metadata={"new": "2"})
    assert (changed.id, changed.metadata) == (msg_id, {"new": "2"})
    assert client.chat.completions.retrieve(msg_id).metadata == {"new": "2"}
    assert [each.id for each in client.chat.completions.list(metadata={"new": "2"})] == [msg_id]
    assert list(client.chat.completions.list(metadata={"old": "1"})) == []
    assert explorer.rows("SELECT task_id, run_id FROM experiences") == [("t", "3")]
    assert client.chat.completions.update(msg_id, metadata=None).metadata == {}


async def test_a_client_without_threads_changes_and_deletes(explorer: RunningExplorer) -> None:
    async with explorer.openai_async() as client:
        answered = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "3+4="}])
        kept = await client.chat.completions.retrieve(answered.id)
        assert kept.choices[0].message.content == answered.choices[0].message.content
        changed = await client.chat.completions.update(answered.id, metadata={"a": "b"})
        assert changed.metadata == {"a": "b"}
        assert (await client.chat.completions.delete(answered.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.retrieve(answered.id)


def test_a_client_may_delete_what_it_is_just_listing(explorer: RunningExplorer) -> None:
    explorer.ledger.recording.record([imported(number) for number in range(5)])
    client = explorer.openai()
    gone = [client.chat.completions.delete(each.id) for each in client.chat.completions.list(limit=2)]
    assert [(each.id, each.deleted, each.object) for each in gone] == [
        (msg_id, True, "chat.completion.deleted") for msg_id in recorded_order(5)
    ]
    assert list(client.chat.completions.list()) == []


def test_two_hundred_replies_are_found_as_soon_as_they_are_answered(explorer: RunningExplorer) -> None:
    """The database is behind the spool then: no client may get a 404 for an acknowledged reply."""

    async def one(client: httpx.AsyncClient) -> int:
        msg_id = (await client.post(CHAT, json=HELLO)).json()["id"]
        return (await client.get(f"{CHAT}/{msg_id}")).status_code

    async def some_at_once() -> list[int]:
        async with httpx.AsyncClient(base_url=explorer.url, timeout=60) as client:
            return await asyncio.gather(*(one(client) for _ in range(20)))

    async def all_at_once() -> list[int]:
        # By several clients: one looks at all its connections again for whoever waits.
        return [each for some in await asyncio.gather(*(some_at_once() for _ in range(10))) for each in some]

    assert asyncio.run(all_at_once()) == [200] * 200


def test_the_python_of_the_page_runs(explorer: RunningExplorer, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = python_of("clients.md", "Stored completions")
    response = explorer.chat(metadata={"task_id": "task-1"}).json()
    exec(block.replace("http://localhost:8010", explorer.url), {})  # noqa: S102
    answer = response["choices"][0]["message"]["content"]
    assert capsys.readouterr().out == f"{response['id']} {answer}\n   user 3+4=\n"
    assert explorer.openai().chat.completions.retrieve(response["id"]).metadata == {"task_id": "task-1", "seen": "yes"}


# Bare HTTP.


def test_a_list_has_openais_shape(many: RunningExplorer) -> None:
    answer = many.http.get(CHAT, params={"limit": 2, "after": "chatcmpl-247"}).json()
    ends = {"first_id": "chatcmpl-248", "last_id": "chatcmpl-249", "has_more": False}
    assert {name: value for name, value in answer.items() if name != "data"} == {"object": "list"} | ends
    assert [each["object"] for each in answer["data"]] == ["chat.completion"] * 2
    assert answer["data"][1] == many.http.get(f"{CHAT}/chatcmpl-249").json()
    empty = many.http.get(CHAT, params={"after": "chatcmpl-249"}).json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert len(many.http.get(CHAT).json()["data"]) == DEFAULT_LIMIT
    assert many.http.get(CHAT, params={"limit": MAX_LIMIT}).json()["has_more"] is True


def test_messages_are_turned_like_completions(many: RunningExplorer) -> None:
    path = f"{CHAT}/chatcmpl-003/messages"
    answer = many.http.get(path, params={"limit": 1}).json()
    first = {"id": "chatcmpl-003-0", "role": "system", "content": "Add.", "name": None, "content_parts": None}
    ends = {"first_id": "chatcmpl-003-0", "last_id": "chatcmpl-003-0"}
    assert answer == {"object": "list", "data": [first], **ends, "has_more": True}
    then = many.http.get(path, params={"limit": 1, "after": "chatcmpl-003-0"}).json()
    assert ([each["content"] for each in then["data"]], then["has_more"]) == (["3+4="], False)
    backwards = many.http.get(path, params={"order": "desc"}).json()
    assert [each["id"] for each in backwards["data"]] == ["chatcmpl-003-1", "chatcmpl-003-0"]
    assert many.http.get(path, params={"after": "chatcmpl-003-1"}).json()["data"] == []


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/chatcmpl-003/messages"])
@pytest.mark.parametrize(
    ("param", "values"),
    [
        ("limit", ["0", "101", "-1", "x", "", "1.5", "9" * 5000, "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT TWO}"]),
        ("order", ["up", "", "ASC"]),
        ("after", ["chatcmpl-none", "", "chatcmpl-003-7", "a\0b"]),
    ],
)
def test_a_part_that_makes_no_sense_is_refused(many: RunningExplorer, path: str, param: str, values: list[str]) -> None:
    for value in values:
        assert error(many.http.get(path, params={param: value}))[:2] == (400, param)


@pytest.mark.parametrize(
    "query",
    [
        "metadata=a",
        'metadata={"a":"b"}',
        "metadata[a=b",
        f"metadata[{'k' * 65}]=v",
        f"metadata[k]={'v' * 513}",
        "&".join(f"metadata[k{number}]=v" for number in range(17)),
    ],
)
def test_a_filter_that_makes_no_sense_is_refused(many: RunningExplorer, query: str) -> None:
    status, param, _ = error(many.http.get(f"{CHAT}?{query}"))
    assert status == 400
    assert param.startswith("metadata")


def test_a_filter_that_would_take_too_long_is_refused(explorer: RunningExplorer) -> None:
    body = json.dumps({"model": "a", "metadata": {"k": "v"}}).encode()
    other = json.dumps({"model": "b"}).encode()
    fields: dict[str, Any] = {"tenant": "default", "experiences": ()}
    reply = [exchange(request=each, **fields) for each in (body, other) for _ in range(MAX_EXAMINED + 1)]
    with_both = exchange(request=body.replace(b'"a"', b'"b"'), **fields)
    explorer.ledger.recording.record([*reply, with_both])
    params = {"model": "b", "metadata[k]": "v"}
    assert error(explorer.http.get(CHAT, params=params)) == (400, "metadata", "filter_too_broad")
    found = explorer.http.get(CHAT, params=params | {"order": "desc"}).json()
    assert [each["id"] for each in found["data"]] == [with_both.msg_id]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "metadata"),
        ({"metadata": "a"}, "metadata"),
        ({"metadata": ["a"]}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": None}}, "metadata.a"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
    ],
)
def test_metadata_that_are_not_openais_are_refused(many: RunningExplorer, body: dict[str, Any], param: str) -> None:
    before = many.http.get(f"{CHAT}/chatcmpl-001").json()
    assert error(many.http.post(f"{CHAT}/chatcmpl-001", json=body))[:2] == (400, param)
    assert many.http.get(f"{CHAT}/chatcmpl-001").json() == before


def test_the_largest_metadata_are_taken(explorer: RunningExplorer) -> None:
    explorer.ledger.recording.record([imported(0)])
    largest = {chr(0x1F600 + number) + "\N{GRINNING FACE}" * 63: "\N{GRINNING FACE}" * 512 for number in range(16)}
    assert explorer.http.post(f"{CHAT}/chatcmpl-000", json={"metadata": largest}).json()["metadata"] == largest
    [key, *_] = largest
    assert explorer.openai().chat.completions.list(metadata={key: largest[key]}).data[0].id == "chatcmpl-000"


@pytest.mark.parametrize("name", ["chatcmpl-none", "a:b", "%00", "%2e%2e", "x" * 2000, "%ed%a0%80", "%F0%9F%98%80"])
def test_an_id_that_is_not_there_is_not_found(many: RunningExplorer, name: str) -> None:
    path = f"{CHAT}/{name}"
    answers = [
        many.http.get(path),
        many.http.delete(path),
        many.http.post(path, json={"metadata": {}}),
        many.http.get(f"{path}/messages"),
    ]
    param = None if name == "%00" else "completion_id"  # a path with a control character is no route's
    for answer in answers:
        assert error(answer) == (404, param, "not_found")
    if name == "chatcmpl-none":
        assert all("'chatcmpl-none'" in answer.json()["error"]["message"] for answer in answers)


def test_what_was_not_stored_is_not_there(explorer: RunningExplorer) -> None:
    msg_id = explorer.chat(store=False).json()["id"]
    assert error(explorer.http.get(f"{CHAT}/{msg_id}"))[0] == 404
    assert explorer.http.get(CHAT).json()["data"] == []


def test_a_deleted_completion_is_gone_for_its_feedback_too(explorer: RunningExplorer) -> None:
    msg_id, other = explorer.chat().json()["id"], explorer.chat().json()["id"]
    explorer.feedback(msg_id)
    assert explorer.counts()[State.REWARDED] == 1
    gone = explorer.http.delete(f"{CHAT}/{msg_id}")
    assert gone.json() == {"object": "chat.completion.deleted", "id": msg_id, "deleted": True}
    assert error(explorer.http.delete(f"{CHAT}/{msg_id}")) == (404, "completion_id", "not_found")

    def outcomes() -> dict[str, str]:
        answer: dict[str, str] = explorer.feedback(msg_id, f"{msg_id}:0", other, reward=0.5).json()["outcomes"]
        return answer

    # At first it may be too busy to say.
    eventually(lambda: outcomes() == {msg_id: "unknown", f"{msg_id}:0": "unknown", other: "duplicate"})
    assert explorer.rows("SELECT msg_id FROM feedback") == [(other,)]


def test_a_deleted_completion_does_not_come_back_from_the_spool(explorer: RunningExplorer) -> None:
    msg_id = explorer.chat().json()["id"]
    explorer.http.delete(f"{CHAT}/{msg_id}")
    explorer.ledger.recording.record(explorer.exchanges())
    assert error(explorer.http.get(f"{CHAT}/{msg_id}"))[0] == 404
    assert sum(explorer.counts().values()) == 0


def test_what_the_trainer_holds_cannot_be_deleted_now(explorer: RunningExplorer) -> None:
    msg_id = explorer.chat().json()["id"]
    explorer.feedback(msg_id)
    explorer.commit()
    epoch = explorer.ledger.training.take_epoch("trainer")
    assert len(explorer.ledger.training.lease(epoch, 1, BatchRules())) == 1
    answer = explorer.http.delete(f"{CHAT}/{msg_id}")
    assert error(answer) == (409, None, "leased")
    assert int(answer.headers["retry-after"]) > 0
    assert explorer.counts()[State.LEASED] == 1
    assert explorer.http.get(f"{CHAT}/{msg_id}").status_code == 200
    explorer.ledger.training.release(epoch)
    assert explorer.http.delete(f"{CHAT}/{msg_id}").status_code == 200


def test_while_the_database_is_away_nobody_is_told_that_nothing_is_there(
    running_explorer: Run, double: EngineDouble
) -> None:
    explorer = running_explorer(double)
    explorer.ledger.recording.away = True
    msg_id = explorer.chat().json()["id"]
    for answer in (
        explorer.http.get(f"{CHAT}/{msg_id}"),
        explorer.http.delete(f"{CHAT}/{msg_id}"),
        explorer.http.post(f"{CHAT}/{msg_id}", json={"metadata": {}}),
        explorer.http.get(f"{CHAT}/{msg_id}/messages"),
    ):
        assert error(answer)[0::2] == (503, "database_unavailable")
        assert int(answer.headers["retry-after"]) > 0
    explorer.ledger.recording.away = False
    eventually(lambda: explorer.http.get(f"{CHAT}/{msg_id}").status_code == 200)


def test_a_database_that_cannot_be_read_is_said_to_be_away(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise LedgerUnavailable("away")

    msg_id = explorer.chat().json()["id"]
    for way in ("_read", "_read_together"):
        monkeypatch.setattr(explorer.ledger.stored, way, away)
    for path in (CHAT, f"{CHAT}/{msg_id}", f"{CHAT}/{msg_id}/messages"):
        answer = explorer.http.get(path)
        assert error(answer) == (503, None, "database_unavailable")
        assert int(answer.headers["retry-after"]) > 0
