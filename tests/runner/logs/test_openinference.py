"""Exchanges of OpenInference's spans, as its instrumentation of `openai` writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runner.logs.writing import ANSWER, CALL, TOOLS, USER, otlp, write_lines
from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.broken import BrokenEntries
from tuneloop.runner.logs.exchange import LoggedExchange
from tuneloop.runner.logs.span_files import read_otlp

LLM = {"openinference.span.kind": "LLM", "llm.model_name": "m", "session.id": "s", "user.id": "ann"}
_CALLED = "llm.input_messages.1.message.tool_calls.0.tool_call"
CHAT = {
    **LLM,
    "metadata": '{"task_id": "t", "run_id": "r"}',
    "llm.tools.0.tool.json_schema": json.dumps(TOOLS[0]),
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.content": "Where is my parcel?",
    "llm.input_messages.1.message.role": "assistant",
    f"{_CALLED}.id": "c1",
    f"{_CALLED}.function.name": "track",
    f"{_CALLED}.function.arguments": '{"number": 7}',
    "llm.input_messages.2.message.role": "tool",
    "llm.input_messages.2.message.tool_call_id": "c1",
    "llm.input_messages.2.message.content": "Berlin",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "On its way.",
}


def read(folder: Path, *spans: dict[str, Any]) -> list[LoggedExchange]:
    made = [{"id": f"s{number}", "attributes": each} for number, each in enumerate(spans)]
    return list(read_otlp(write_lines(folder / "traces.jsonl", [otlp(*made)])))


def test_a_chat_with_tools_is_read(tmp_path: Path) -> None:
    [exchange] = read(tmp_path, CHAT)
    assert exchange.messages == (
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "Berlin", "tool_call_id": "c1"},
    )
    assert (exchange.reply, list(exchange.tools)) == ((ANSWER,), TOOLS)
    assert (exchange.model, exchange.user, exchange.conversation) == ("m", "ann", f"s/{'a' * 32}")
    assert (exchange.train, exchange.labels) == (True, {"task_id": "t", "run_id": "r"})


def test_contents_of_parts_are_read(tmp_path: Path) -> None:
    asked, said = "llm.input_messages.0.message.contents", "llm.output_messages.0.message.contents"
    of_parts = {
        **LLM,
        "llm.input_messages.0.message.role": "user",
        f"{asked}.0.message_content.type": "text",
        f"{asked}.0.message_content.text": "What is it?",
        f"{asked}.1.message_content.type": "image",
        f"{asked}.1.message_content.image.image.url": "https://x/y.png",
        "llm.output_messages.0.message.role": "assistant",
        f"{said}.0.message_content.type": "reasoning",
        f"{said}.0.message_content.text": "Hm.",
        f"{said}.1.message_content.type": "text",
        f"{said}.1.message_content.text": "A cat.",
    }
    [exchange] = read(tmp_path, of_parts)
    image = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    assert exchange.messages[0]["content"] == [{"type": "text", "text": "What is it?"}, image]
    assert exchange.reply == ({"role": "assistant", "content": "A cat.", "reasoning_content": "Hm."},)


def test_tools_of_anthropic_are_read_as_those_of_openai(tmp_path: Path) -> None:
    schema = json.dumps({"name": "track", "input_schema": {"type": "object"}})
    [exchange] = read(tmp_path, CHAT | {"llm.tools.0.tool.json_schema": schema, "llm.tools.1.tool.json_schema": "{"})
    assert list(exchange.tools) == TOOLS


@pytest.mark.parametrize(
    "but",
    [
        {"openinference.span.kind": "TOOL"},
        {"llm.input_messages.0.message.content": "__REDACTED__"},
    ],
)
def test_what_is_no_chat_or_hidden_is_left_out(tmp_path: Path, but: dict[str, str]) -> None:
    assert read(tmp_path, CHAT | but) == []


@pytest.mark.parametrize("missing", ["llm.input_messages.1.", "llm.input_messages.0.message.role"])
def test_a_conversation_with_a_hole_is_broken(tmp_path: Path, missing: str) -> None:
    whole = CHAT | {"llm.input_messages.0.message.name": "ann"}
    with pytest.raises(LogRefused, match=r"traces\.jsonl: span 2: llm\.input_messages\S* (is not whole|has no role)"):
        read(tmp_path, CHAT, {name: value for name, value in whole.items() if not name.startswith(missing)})


@pytest.mark.parametrize("kind", ["Attributes", "Events"])
@pytest.mark.parametrize("kept", [CHAT, {name: CHAT[name] for name in CHAT if name.startswith("llm.output")}])
def test_a_span_that_was_cut_off_when_it_was_written_is_broken(tmp_path: Path, kept: dict[str, str], kind: str) -> None:
    """The oldest attributes go first, and an opt-out may be among them."""
    batch = otlp({"id": "s1", "attributes": kept}, {"id": "s2", "attributes": CHAT})
    batch["resourceSpans"][0]["scopeSpans"][0]["spans"][0][f"dropped{kind}Count"] = 89
    broken = BrokenEntries()
    exchanges = list(read_otlp(write_lines(tmp_path / "traces.jsonl", [batch]), broken))
    assert [each.exchange_id for each in exchanges] == ["s2"]
    assert broken.counts == {"broken span": 1}
    assert "span 1: 89 of its attributes or events were left out" in next(broken.report())


@pytest.mark.parametrize("metadata", ['{"tuneloop_train": false}', '{"train": "no"}'])
def test_an_opt_out_in_the_metadata_is_seen(tmp_path: Path, metadata: str) -> None:
    assert [each.train for each in read(tmp_path, CHAT | {"metadata": metadata})] == [False]
    assert [each.train for each in read(tmp_path, CHAT | {"metadata": "["})] == [True]
