"""Messages of clients and frameworks, as chat messages."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.install.wheels import ROOT
from tuneloop.runner.rewards.reply import chat_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "invoice"}'}}
RUN = [
    {"role": "user", "content": "Find it."},
    {"role": "assistant", "content": "I search.", "tool_calls": [CALL], "reasoning_content": "Hm."},
    {"role": "tool", "content": "1 mail", "tool_call_id": "c1", "name": "search"},
    {"role": "assistant", "content": "Here it is."},
]

BLOCKS = """
import json, sys
from agentscope.message import Msg, TextBlock, ThinkingBlock
try:
    from agentscope.message import ToolUseBlock, ToolResultBlock
    call = ToolUseBlock(type="tool_use", id="c1", name="search", input={"q": "invoice"})
    result = ToolResultBlock(type="tool_result", id="c1", name="search", output=[TextBlock(type="text", text="1 mail")])
    back = [Msg("system", [result], "system")]
    said = [TextBlock(type="text", text="I search."), ThinkingBlock(type="thinking", thinking="Hm."), call]
except ImportError:
    from agentscope.message import ToolCallBlock, ToolResultBlock
    call = ToolCallBlock(id="c1", name="search", input='{"q": "invoice"}')
    result = ToolResultBlock(id="c1", name="search", output=[TextBlock(text="1 mail")])
    back = []
    said = [TextBlock(text="I search."), ThinkingBlock(thinking="Hm."), call, result]
def msg(name, content, role):
    return Msg(name=name, content=content, role=role)
text = lambda words: [TextBlock(type="text", text=words)]
user, end = msg("user", text("Find it."), "user"), msg("agent", text("Here it is."), "assistant")
run = [user, msg("agent", said, "assistant"), *back, end]
from tuneloop.runner.rewards.reply import chat_messages
print(json.dumps(chat_messages(run)))
"""

LANGCHAIN = """
import json
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
call = {"id": "c1", "name": "search", "args": {"q": "invoice"}}
told = AIMessage("I search.", tool_calls=[call], additional_kwargs={})
back = ToolMessage("1 mail", tool_call_id="c1", name="search")
from tuneloop.runner.rewards.reply import chat_messages
print(json.dumps(chat_messages([HumanMessage("Find it."), told, back, AIMessage("Here it is.")])))
"""

OPENAI = """
import json
from openai.types.chat import ChatCompletion
call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "invoice"}'}}
def completion(message):
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    return ChatCompletion(id="x", choices=[choice], created=1, model="m", object="chat.completion")
told = completion({"content": "I search.", "tool_calls": [call], "reasoning_content": "Hm."})
back = {"role": "tool", "content": "1 mail", "tool_call_id": "c1", "name": "search"}
from tuneloop.runner.rewards.reply import chat_messages
user = {"role": "user", "content": "Find it."}
print(json.dumps(chat_messages([user, told, back, completion({"content": "Here it is."})])))
"""


def heard(place: str, code: str) -> Any:
    python = ROOT / ".venv" / "clients" / place / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{place} is not installed: scripts/install-clients")
    environment = {"PYTHONPATH": str(ROOT / "build" / "links"), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    done = subprocess.run(
        [python, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def without_thought(run: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in each.items() if key != "reasoning_content"} for each in run]


def test_messages_stay_what_they_are() -> None:
    assert chat_messages(RUN) == RUN


@pytest.mark.parametrize("place", ["agentscope1", "agentscope2"])
def test_agentscope(place: str) -> None:
    assert heard(place, BLOCKS) == RUN


def test_langchain() -> None:
    assert heard("langchain", LANGCHAIN) == without_thought(RUN)


@pytest.mark.parametrize("place", ["openai1", "openai3"])
def test_openai(place: str) -> None:
    assert heard(place, OPENAI) == RUN


def test_anthropic_blocks() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "invoice"}}
    said = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I search."}, use]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "no such mail", "is_error": True}
    made = chat_messages([{"role": "assistant", "content": said}, {"role": "user", "content": [result]}])
    assert made[0] == RUN[1]
    assert made[1] == {"role": "tool", "content": "no such mail", "tool_call_id": "c1", "is_error": True}


def test_what_stands_in_one_message_stays_in_its_order() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "invoice"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "no such mail"}
    said = [use, result, {"type": "text", "text": "Nothing."}]
    made = chat_messages({"role": "assistant", "content": said, "reasoning_content": "Hm."})
    assert [(each["role"], each["content"]) for each in made] == [
        ("assistant", ""),
        ("tool", "no such mail"),
        ("assistant", "Nothing."),
    ]
    assert [each.get("reasoning_content") for each in made] == ["Hm.", None, None]


def test_images_stay_parts() -> None:
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    assert chat_messages({"role": "user", "content": parts})[0]["content"] == parts


@pytest.mark.parametrize("said", [5, {"text": "x"}, None, [{"role": "user"}]])
def test_what_is_no_message_is_refused(said: object) -> None:
    with pytest.raises(ValueError, match=r"no chat message|no object"):
        chat_messages(said)
