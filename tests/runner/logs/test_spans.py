"""Exchanges of OpenTelemetry's spans and of AgentScope Studio's database."""

import json
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.judge import judge_place
from tests.install.wheels import ROOT
from tests.runner.logs.writing import ANSWER, CALL, TOOLS, USER, any_value, key_values, otlp, write_lines
from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.exchange import LoggedExchange
from tuneloop.runner.logs.span_logs import read_otlp, read_studio

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
NAMELESS = '{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}'
READ = (
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I look."},
    {"role": "tool", "content": "Berlin", "tool_call_id": "c1"},
)


def of_otlp(folder: Path, *spans: dict[str, Any], **but: Any) -> list[LoggedExchange]:
    return list(read_otlp(write_lines(folder / "traces.jsonl", [otlp(*spans, **but)])))


def test_the_current_conventions_are_read(tmp_path: Path) -> None:
    flat = [{"type": "function", "name": "track", "parameters": {"type": "object"}}]
    system = [{"type": "text", "content": "Be brief."}]
    more = {"gen_ai.tool.definitions": json.dumps(flat), "gen_ai.system_instructions": json.dumps(system)}
    [read] = of_otlp(tmp_path, {"id": "s1", "attributes": CHAT | MESSAGES | more})
    assert read.messages == ({"role": "system", "content": "Be brief."}, *READ)
    assert read.reply == (ANSWER,)
    assert list(read.tools) == TOOLS
    assert (read.source, read.exchange_id, read.model, read.at) == ("otel", "s1", "m", 1.7e9)
    assert read.conversation == f"c/{'a' * 32}"


def test_what_agentscope_2_has_in_one_message_is_in_its_order(tmp_path: Path) -> None:
    """A call, its result (blocks as JSON text) and what was said then are parts of one message of the assistant's."""
    blocks = [{"type": "text", "text": "Berlin", "id": "85e4", "finished_at": None}]
    result = {"type": "tool_call_response", "id": "c1", "response": json.dumps(blocks)}
    parts = [*ASKED[1]["parts"], result, *SAID[0]["parts"], {"type": "tool_call_response", "id": "c2", "response": "5"}]
    asked = [ASKED[0], {"role": "assistant", "name": "solver", "parts": parts}, ASKED[0]]
    [read] = of_otlp(tmp_path, {"id": "s1", "attributes": CHAT | {"gen_ai.input.messages": json.dumps(asked)}})
    assert read.messages == (*READ, ANSWER, {"role": "tool", "content": "5", "tool_call_id": "c2"}, USER)


def test_attributes_need_not_be_text(tmp_path: Path) -> None:
    structured = {"gen_ai.input.messages": ASKED, "gen_ai.output.messages": SAID}
    [read] = of_otlp(tmp_path, {"id": "s1", "attributes": CHAT | structured})
    assert (read.messages, read.reply) == (READ, (ANSWER,))


def test_messages_in_the_details_event_are_read(tmp_path: Path) -> None:
    details = [("gen_ai.client.inference.operation.details", MESSAGES)]
    [read] = of_otlp(tmp_path, {"id": "s1", "attributes": CHAT, "events": details})
    assert (read.messages, read.reply) == (READ, (ANSWER,))


def test_events_of_the_older_conventions_are_read(tmp_path: Path) -> None:
    events = [
        ("gen_ai.user.message", {"content": "Where is my parcel?"}),
        ("gen_ai.assistant.message", {"tool_calls": [CALL]}),
        ("gen_ai.tool.message", {"content": "Berlin", "id": "c1"}),
        ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": {"content": "On its way."}}),
    ]
    [read] = of_otlp(tmp_path, {"id": "s1", "attributes": CHAT, "events": events})
    assert [each["role"] for each in read.messages] == ["user", "assistant", "tool"]
    assert read.messages[1]["tool_calls"] == [CALL]
    assert read.reply == (ANSWER,)


def logs(*records: tuple[str, str, dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """Log records of a span, as OTLP has them: (span, event, attributes, body)."""
    made = [
        {
            "timeUnixNano": str(10 - number),
            "traceId": "a" * 32,
            "spanId": span,
            "eventName": event,
            "attributes": key_values(attributes),
            "body": any_value(body),
        }
        for number, (span, event, attributes, body) in enumerate(records)
    ]
    return {"resourceLogs": [{"scopeLogs": [{"scope": {"name": "openai_v2"}, "logRecords": made}]}]}


def test_events_that_are_log_records_are_read_in_their_order(tmp_path: Path) -> None:
    """As the instrumentation of `openai` writes them, to the same file of a collector's."""
    said = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "On its way."}}
    records = logs(
        ("s1", "gen_ai.choice", {"gen_ai.system": "openai"}, said),
        ("s1", "gen_ai.tool.message", {}, {"content": "Berlin", "id": "c1"}),
        ("s1", "gen_ai.assistant.message", {}, {"tool_calls": [CALL]}),
        ("s1", "gen_ai.user.message", {}, {"content": "Where is my parcel?"}),
        ("s2", "gen_ai.client.inference.operation.details", MESSAGES, {}),
    )
    spans = otlp({"id": "s1", "attributes": CHAT}, {"id": "s2", "attributes": CHAT})
    metrics = {"resourceMetrics": []}
    for lines in ([records, metrics, spans], [spans, records]):
        first, second = read_otlp(write_lines(tmp_path / "all.jsonl", lines))
        assert [each["role"] for each in first.messages] == ["user", "assistant", "tool"]
        assert first.messages[1]["tool_calls"] == [CALL]
        assert (first.reply, second.messages, second.reply) == ((ANSWER,), READ, (ANSWER,))


def test_what_is_no_chat_or_kept_no_messages_is_left_out(tmp_path: Path) -> None:
    tool = {"id": "s1", "attributes": {"gen_ai.operation.name": "execute_tool"}}
    assert of_otlp(tmp_path, tool, {"id": "s2", "attributes": CHAT}) == []


def test_a_call_that_failed_has_no_reply(tmp_path: Path) -> None:
    [read] = of_otlp(tmp_path, {"id": "s1", "attributes": CHAT | MESSAGES, "status": {"code": 2}})
    assert (read.messages, read.reply) == (READ, ())


@pytest.mark.parametrize("name", ["tuneloop.train", "train"])
def test_an_opt_out_is_seen_on_the_span_and_its_resource(tmp_path: Path, name: str) -> None:
    span = {"id": "s1", "attributes": CHAT | MESSAGES}
    assert [each.train for each in of_otlp(tmp_path, span)] == [True]
    assert [each.train for each in of_otlp(tmp_path, span, resource={name: False})] == [False]
    assert [each.train for each in of_otlp(tmp_path, {**span, "attributes": CHAT | MESSAGES | {name: "false"}})] == [
        False
    ]


@pytest.mark.parametrize(
    "text",
    ["", "[5]", '{"spans": []}', '{"resourceLogs": 5}', NAMELESS],
)
def test_what_is_no_otlp_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    if text:
        with pytest.raises(LogRefused, match=r"x\.json"):
            list(read_otlp(tmp_path / "x.json"))
    else:
        assert list(read_otlp(tmp_path / "x.json")) == []


# Studio.

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


TRACED = """
import asyncio, json, sys
from agentscope.model import OpenAIChatModel
from google.protobuf.json_format import MessageToJson
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import agentscope
spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
agentscope._config.trace_enabled = True
url, to = sys.argv[1:]
model = OpenAIChatModel("m", api_key="none", stream=False, client_kwargs={"base_url": url})
tools = [{"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}]
asyncio.run(model([{"role": "user", "content": "Where is my parcel?"}], tools=tools))
open(to, "w").write(MessageToJson(encode_spans(spans.get_finished_spans()), indent=None))
"""


def test_what_agentscope_traces_is_read(tmp_path: Path) -> None:
    python = ROOT / ".venv" / "clients" / "agentscope1" / "bin" / "python"
    if not python.exists():
        pytest.skip("agentscope1 is not installed: scripts/install-clients")
    file = tmp_path / "traces.json"
    with judge_place() as model:
        model.says = ["On its way."]
        command = [python, "-W", "ignore", "-c", TRACED, model.base_url, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    [read] = read_otlp(file)
    assert (read.messages, read.reply, read.model) == ((USER,), (ANSWER,), "m")
    assert list(read.tools) == TOOLS
