"""A tool call at the limit of tokens: whether it was cut off is told by its tokens, not by what the engine calls it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.dialects.test_dialects import ASKED, MESSAGES, RESPONSES, events
from tests.explorer.running import RunningExplorer, explorer_running, settings_for
from tuneloop.shared.experience import ReplyLimit
from tuneloop.shared.settings.base_model import limit_of

pytestmark = pytest.mark.contract

# What vLLM 0.32 was recorded to answer: a call of 67 tokens, the last of them <|im_end|>, ended as `tool_calls`.
TOKENS, END, PROMPT = 67, 258, 634
LENGTH = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: dict[str, Any] = {
    CHAT: {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    RESPONSES: {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False},
    MESSAGES: {"name": "add", "input_schema": PARAMETERS},
}


def ending(reply: dict[str, Any]) -> object:
    """What a client of Anthropic's or of OpenAI's responses is told."""
    return reply.get("stop_reason") or reply.get("status")


def last_ending(told: list[dict[str, Any]]) -> object:
    holders = [each.get(name) for each in told for name in ("delta", "response")]
    return [found for each in holders if isinstance(each, dict) and (found := ending(each))][-1]


@pytest.mark.parametrize("path", TOOLS)
def test_a_call_that_fills_the_limit_and_has_no_end_was_cut_off(
    tmp_path: Path, double: EngineDouble, path: str
) -> None:
    settings = settings_for(tmp_path, [double.url])
    names = settings.model.model_path / "generation_config.json"
    with_end = json.dumps({"eos_token_id": [END]})
    names.write_text(json.dumps({"eos_token_id": [END + 1]}))
    whole = {MESSAGES: ("tool_use", "max_tokens"), RESPONSES: ("completed", "incomplete")}.get(path)
    found: list[str | None] = []

    def ask(explorer: RunningExplorer, most: int) -> None:
        body = {**ASKED[path], "tools": [TOOLS[path]], LENGTH[path]: most}
        reply = explorer.http.post(path, json=body)
        stream = explorer.http.post(path, json=body | {"stream": True})
        assert (reply.status_code, stream.status_code) == (200, 200), reply.text
        [one], [other] = [each.experiences for each in explorer.exchanges()[-2:]]
        assert (len(one.completion_ids), one.drop_reason, one.tool_calls is None) == (4 * TOKENS, None, False)
        assert one.finish_reason == other.finish_reason
        found.append(one.finish_reason)
        if whole is not None:
            is_cut = one.finish_reason == "length"
            assert ending(reply.json()) == last_ending(events(stream.text)) == whole[is_cut]

    with explorer_running(settings) as explorer:
        ask(explorer, TOKENS)
        ask(explorer, TOKENS + 1)
    names.write_text(with_end)  # the call came to its end with the last token that it could have
    with explorer_running(settings) as explorer:
        ask(explorer, TOKENS)
    assert found == ["length", "tool_calls", "tool_calls"]


@pytest.mark.parametrize(
    ("reason", "prompt", "reply", "is_cut"),
    [
        ("tool_calls", 5, [1, 2, 3], True),
        ("stop", 5, [1, 2, 3], True),
        ("stop", 5, [1, 2, 9], False),
        ("tool_calls", 5, [1, 2], False),
        ("tool_calls", 8, [1, 2], True),  # the context is full
        ("abort", 5, [1, 2, 3], False),
        (None, 5, [1, 2, 3], False),
        ("tool_calls", 5, [], False),
    ],
)
def test_the_tokens_say_whether_a_reply_was_cut_off(
    reason: str | None, prompt: int, reply: list[int], is_cut: bool
) -> None:
    assert ReplyLimit(frozenset({9}), context=10, most=3).cuts(reason, prompt, reply) is is_cut
    assert not ReplyLimit(frozenset(), context=10, most=3).cuts(reason, prompt, reply)  # no end is known


def test_the_limit_is_what_the_request_the_settings_and_the_model_say(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, ["http://localhost:1"])
    folder = settings.model.model_path
    for file in ("generation_config.json", "tokenizer_config.json"):
        (folder / file).unlink(missing_ok=True)
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": 7, "max_position_embeddings": 64}}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<e>"}}')
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 8, "content": "<e>"}, {"id": 9, "content": "x"}]}')
    found = limit_of(settings)
    assert found == ReplyLimit(frozenset({7, 8}), 64)
    assert found.of({"max_tokens": "3"}, 5).most == 3
    assert found.of({}, 5).most == 5
    assert found.of({"max_completion_tokens": 2, "max_tokens": 3}, None).most == 2
    assert found.of({"max_tokens": []}, 5).most is None
