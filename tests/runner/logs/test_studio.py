"""Exchanges of AgentScope Studio's database."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.runner.logs.writing import ANSWER, CALL, TOOLS, USER
from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.exchange import BrokenEntries, LoggedExchange
from tuneloop.runner.logs.studio_logs import read_studio

CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.conversation.id": "c"}
ASKED = [
    {"role": "user", "parts": [{"type": "text", "content": "Where is my parcel?"}]},
    {
        "role": "assistant",
        "parts": [
            {"type": "reasoning", "content": "I look."},
            {"type": "tool_call", "id": "c1", "name": "track", "arguments": {"number": 7}},
        ],
    },
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "Berlin"}]},
]
SAID = [{"role": "assistant", "parts": [{"type": "text", "content": "On its way."}], "finish_reason": "stop"}]
MESSAGES = {"gen_ai.input.messages": json.dumps(ASKED), "gen_ai.output.messages": json.dumps(SAID)}
READ = (
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I look."},
    {"role": "tool", "content": "Berlin", "tool_call_id": "c1"},
)


NEW = "id, traceId, spanId, parentSpanId, name, startTimeUnixNano, attributes, events, status, resource, operationName"
OLD = "id, traceId, parentSpanId, name, startTime, attributes, events, status"


def studio(folder: Path, columns: str, *rows: dict[str, Any]) -> Path:
    path = folder / "database.sqlite"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"CREATE TABLE span_table ({columns})")
        for row in rows:
            marks = ", ".join("?" * len(row))
            values = [each if isinstance(each, str | int) else json.dumps(each) for each in row.values()]
            database.execute(f"INSERT INTO span_table ({', '.join(row)}) VALUES ({marks})", values)
    return path


def test_studio_is_read(tmp_path: Path) -> None:
    common = {"traceId": "t", "status": {"code": 1}, "events": []}
    late = {"id": "2", "spanId": "2", "startTimeUnixNano": "2", "attributes": CHAT | MESSAGES, **common}
    agent = {"id": "0", "spanId": "0", "attributes": {"gen_ai.operation.name": "invoke_agent"} | MESSAGES, **common}
    call = {"kwargs": {"messages": [USER]}, "args": []}
    first = {"gen_ai.operation.name": "chat", "agentscope.function.input": call}
    early = {"id": "1", "spanId": "1", "startTimeUnixNano": "1", "attributes": first, **common}
    read = list(read_studio(studio(tmp_path, NEW, late, agent, early)))
    assert [(each.source, each.exchange_id) for each in read] == [("studio", "1"), ("studio", "2")]
    assert [each.messages for each in read] == [(USER,), READ]


def test_nested_attributes_of_older_releases_are_read(tmp_path: Path) -> None:
    inner = {"input": {"messages": json.dumps(ASKED)}, "output": {"messages": json.dumps(SAID)}}
    nested = {"gen_ai": inner | {"operation": {"name": "chat"}, "conversation": {"id": "run"}}}
    row = {"id": "1", "traceId": "t", "attributes": nested, "status": "OK", "startTime": "2025-01-01"}
    [read] = read_studio(studio(tmp_path, OLD, row))
    assert (read.messages, read.reply, read.conversation) == (READ, (ANSWER,), "run/t")


def test_what_is_no_studio_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("not a database, but long enough to be looked at")
    for path in (tmp_path / "away.sqlite", tmp_path / "text.sqlite", studio(tmp_path, "id, name")):
        with pytest.raises(LogRefused, match=path.name):
            list(read_studio(path))


def read(folder: Path, **attributes: Any) -> list[LoggedExchange]:
    common = {
        "id": "1",
        "spanId": "1",
        "traceId": "t",
        "startTimeUnixNano": "1700000000000000000",
        "status": {"code": 1},
    }
    return list(read_studio(studio(folder, NEW, {**common, "attributes": CHAT | attributes})))


def test_the_conventions_of_opentelemetry_are_read(tmp_path: Path) -> None:
    flat = [{"type": "function", "name": "track", "parameters": {"type": "object"}}]
    system = [{"type": "text", "content": "Be brief."}]
    more = {"gen_ai.tool.definitions": json.dumps(flat), "gen_ai.system_instructions": json.dumps(system)}
    [found] = read(tmp_path, **MESSAGES, **more)
    assert found.messages == ({"role": "system", "content": "Be brief."}, *READ)
    assert (found.reply, list(found.tools)) == ((ANSWER,), TOOLS)
    assert (found.exchange_id, found.model, found.at, found.conversation) == ("1", "m", 1.7e9, "c/t")


def test_what_agentscope_2_has_in_one_message_is_in_its_order(tmp_path: Path) -> None:
    """A call, its result (blocks as JSON text) and what was said then are parts of one message of the assistant's."""
    blocks = [{"type": "text", "text": "Berlin", "id": "85e4", "finished_at": None}]
    result = {"type": "tool_call_response", "id": "c1", "response": json.dumps(blocks)}
    parts = [*ASKED[1]["parts"], result, *SAID[0]["parts"], {"type": "tool_call_response", "id": "c2", "response": "5"}]
    asked = [ASKED[0], {"role": "assistant", "name": "solver", "parts": parts}, ASKED[0]]
    [found] = read(tmp_path, **{"gen_ai.input.messages": asked})  # attributes need not be text
    assert found.messages == (*READ, ANSWER, {"role": "tool", "content": "5", "tool_call_id": "c2"}, USER)


def test_what_is_no_chat_kept_no_messages_or_failed_is_no_answer(tmp_path: Path) -> None:
    common = {"traceId": "t", "status": {"code": 1}}
    tool = {"id": "1", "attributes": {"gen_ai.operation.name": "execute_tool"}, **common}
    failed = {"id": "3", "attributes": CHAT | MESSAGES, "traceId": "t", "status": {"code": 2}}
    [found] = read_studio(studio(tmp_path, NEW, tool, {"id": "2", "attributes": CHAT, **common}, failed))
    assert (found.messages, found.reply) == (READ, ())


def test_broken_rows_cost_no_others(tmp_path: Path) -> None:
    common = {"traceId": "t", "status": {"code": 1}}
    rows = [
        {"id": "1", "spanId": "1", "startTimeUnixNano": "1", "attributes": '{"gen_ai', **common},
        {"id": "2", "spanId": "2", "startTimeUnixNano": "2", "attributes": CHAT | MESSAGES, **common},
        {"id": "3", "spanId": "3", "startTimeUnixNano": "3", "attributes": [5], **common},
    ]
    file, broken = studio(tmp_path, NEW, *rows), BrokenEntries()
    assert [each.exchange_id for each in read_studio(file, broken)] == ["2"]
    assert broken.counts == {"broken span": 2}
    assert f"{file}: span_table row 1: " in next(broken.report())
    with pytest.raises(LogRefused, match="row 1"):
        list(read_studio(file))


@pytest.mark.parametrize("where", ["attributes", "resource"])
def test_an_opt_out_of_any_span_holds_for_its_trace(tmp_path: Path, where: str) -> None:
    agent, no = {"gen_ai.operation.name": "invoke_agent"}, {"tuneloop.train": False}
    spans = [
        {"traceId": "a", "attributes": CHAT | MESSAGES},
        {"traceId": "a", "attributes": agent}
        | ({where: agent | no} if where == "attributes" else {where: {"attributes": no}}),
        {"traceId": "b", "attributes": CHAT | MESSAGES},
    ]
    rows = [{"id": str(at), "startTimeUnixNano": str(at), **each} for at, each in enumerate(spans)]
    assert [each.train for each in read_studio(studio(tmp_path, NEW, *rows))] == [False, True]
