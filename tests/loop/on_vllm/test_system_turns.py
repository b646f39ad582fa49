"""Instructions of any role reach the prompt of real vLLM, with a template that raises and with one that skips them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from transformers import AutoTokenizer

from tests.loop.harness.bare_engine import MODEL, attached_to, engine_on
from tests.loop.harness.services import Service, free_port, ledger_of, running, wait_for, write_settings
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.doctor import examine_experiment

pytestmark = [pytest.mark.vllm, pytest.mark.contract]

Json = dict[str, Any]

#: The template in examples/sums skips `developer`, and shows a later `system` by this condition.
_LATER = "(message.role == 'system' and not loop.first)"

#: What stands before it. Where a template does not have the word, vLLM itself makes `developer` turns `system` ones.
TEMPLATES = {
    "raises": "{%- for message in messages %}{%- if message.role == 'developer' or (message.role == 'system' and not "
    "loop.first) %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}{%- endfor %}",
    "skips": "{#- Nothing is said of 'developer'. -#}",
}

SHELL: Json = {"type": "function", "name": "shell", "description": "d", "parameters": {"type": "object"}}


def turn(role: str, *texts: str, kind: str = "text") -> Json:
    return {"role": role, "content": [{"type": kind, "text": each} for each in texts]}


@pytest.fixture(scope="module", params=TEMPLATES)
def explorer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("instructed")
    words = shutil.copytree(model, folder / "model")
    template = words / "chat_template.jinja"
    assert _LATER in template.read_text()
    template.write_text(TEMPLATES[request.param] + template.read_text().replace(_LATER, "false"))
    config = write_settings(folder, words)
    with engine_on(free_port(), folder, words) as engine:
        values = yaml.safe_load(config.read_text())
        values["model"] |= {"served_model_name": MODEL, "max_model_len": 4096}
        values["explorer"]["rollout_model"] = attached_to(engine)
        config.write_text(yaml.safe_dump(values))
        with running(config) as service:
            yield service


@pytest.fixture(scope="module")
def ledger(explorer: Service) -> Iterator[Ledger]:
    found = ledger_of(explorer.settings)
    yield found
    found.close()


@pytest.fixture
def http(explorer: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=explorer.url, timeout=120) as client:
        yield client


def prompt_of(explorer: Service, ledger: Ledger, msg_id: str) -> str:
    """The recorded prompt of a reply, without the marks around its turns."""
    wait_for(lambda: bool(ledger.exports.replies_named("default", [msg_id])), timeout_s=30, why="it was not recorded")
    [reply] = ledger.exports.replies_named("default", [msg_id])
    words = AutoTokenizer.from_pretrained(explorer.settings.model.model_path)
    return str(words.decode(reply.numbers[0].tolist(), skip_special_tokens=True))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_instructions_are_in_the_recorded_prompt(
    explorer: Service, http: httpx.Client, ledger: Ledger, path: str
) -> None:
    before, after = [turn("user", "hi")], [turn("user", "and now?")]
    body: Json = {
        "/v1/chat/completions": {
            "messages": [turn("system", "be kind"), *before, turn("developer", "be brief", "always"), *after],
            "max_tokens": 4,
        },
        "/v1/messages": {
            "system": turn("", "x-anthropic-billing-header: cc_version=2", "be kind")["content"],
            "messages": [*before, turn("system", "be brief\n", "always"), *after],
            "max_tokens": 4,
        },
        "/v1/responses": {
            "instructions": "be kind",
            "input": [
                turn("user", "hi", kind="input_text"),
                turn("developer", "be brief", "always", kind="input_text"),
                turn("user", "and now?", kind="input_text"),
            ],
            "max_output_tokens": 4,
        },
    }[path]
    answer = http.post(path, json=body | {"model": MODEL})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tuneloop-merged-system"] == "1"
    prompt = prompt_of(explorer, ledger, answer.json()["id"])
    assert prompt.startswith("system\nbe kind\n\nbe brief\nalways\nuser\nhi\nuser\nand now?\n"), prompt
    if path == "/v1/messages":
        counted = http.post(
            f"{path}/count_tokens", json={name: body[name] for name in ("system", "messages")} | {"model": MODEL}
        )
        assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
    if path == "/v1/chat/completions":
        counted = http.post("/tokenize", json={"model": MODEL, "messages": body["messages"]})
        assert counted.json()["count"] == answer.json()["usage"]["prompt_tokens"]


def test_a_first_system_message_and_what_follows_it_is_left_as_it_is(
    explorer: Service, http: httpx.Client, ledger: Ledger
) -> None:
    messages = [turn("system", "be kind"), turn("user", "hi")]
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 4})
    assert "x-tuneloop-merged-system" not in answer.headers
    assert prompt_of(explorer, ledger, answer.json()["id"]).startswith("system\nbe kind\nuser\nhi\n")


def test_a_request_of_codex_is_answered_with_its_instructions(explorer: Service, http: httpx.Client) -> None:
    hosted = [SHELL, {"type": "custom", "name": "patch"}, {"type": "web_search"}]
    body: Json = {
        "model": MODEL,
        "instructions": "be kind",
        "input": [
            {"type": "message", **turn("developer", "be brief", "always", kind="input_text")},
            {"type": "message", **turn("user", "hi", kind="input_text")},
        ],
        "tools": [*hosted, {"type": "namespace", "name": "mcp", "description": "d", "tools": [SHELL]}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"x": "y"},
        "max_output_tokens": 4,
    }
    answer = http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.headers.get("x-tuneloop-merged-system")) == (200, "1"), answer.text
    last = json.loads([line for line in answer.text.splitlines() if line.startswith("data: ")][-1][6:])
    assert last["type"] in ("response.completed", "response.incomplete"), last
    assert last["response"]["instructions"] == "be kind"
    assert answer.headers["x-tuneloop-ignored"] == "tools.web_search"
    wait_for(lambda: examine_experiment(explorer.settings).not_stored.get("store_false"), why="nobody counted it")
