"""Claude Code and Codex themselves go through a task, with a model on real vLLM, and their replies become trainable."""

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.clients.packages import PLACES
from tests.clients.scripted_model import LONGEST, write_scripted_model
from tests.loop.harness.services import Service, commit, ledger_of, running, wait_for, write_settings
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.export import ExportedReply, Selection
from tuneloop.shared.ledger.ledger import Ledger

pytestmark = [pytest.mark.vllm, pytest.mark.contract, pytest.mark.xdist_group("clients")]

Json = dict[str, Any]

BIN = PLACES / "harnesses" / "node_modules" / ".bin"
COMMAND, DONE = "echo 42 > answer.txt", "It is done."
MODEL, SONNET, HAIKU = "org/tiny", "claude-sonnet-4-5", "claude-haiku-4-5"
CALLS = {
    "Bash": json.dumps({"command": COMMAND, "description": "Writes the answer"}),
    "exec_command": json.dumps({"cmd": COMMAND}),
}

#: What Claude Code asks beside its conversation when a person sits at it, which `-p` does not.
TITLE: Json = {
    "model": SONNET,
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.0b8; cc_entrypoint=cli;"},
        {"type": "text", "text": 'Name the session.\n\nReturn JSON with a single "title" field.'},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "<session>\nhi\n</session>"}]}],
    "output_config": {
        "format": {
            "type": "json_schema",
            "schema": {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]},
        }
    },
    "temperature": 1,
}


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("agents")
    model = write_scripted_model(folder / "model", CALLS, DONE)
    config = write_settings(folder, model)
    values = yaml.safe_load(config.read_text())
    values["model"] |= {"served_model_name": MODEL, "max_model_len": LONGEST, "max_response_tokens": 16}
    values["model"]["aliases"] = {SONNET: {}, HAIKU: {"train": False}}
    values["explorer"]["clamp_max_tokens"] = True
    values["explorer"]["rollout_model"]["kv_cache_memory_bytes"] = 512 << 20
    values["tenants"] = {"default": {"store": "always"}}
    config.write_text(yaml.safe_dump(values))
    with running(config) as service:
        yield service


@pytest.fixture(scope="module")
def ledger(explorer: Service) -> Iterator[Ledger]:
    found = ledger_of(explorer.settings)
    yield found
    assert found.reports.imbalance() == []
    found.close()


def run_url(explorer: Service, task: str) -> str:
    token = base64.urlsafe_b64encode(json.dumps({"task_id": task, "run_id": "0"}).encode()).decode().rstrip("=")
    return f"{explorer.url}/run/{token}"


def run(folder: Path, *command: str, **environment: str) -> str:
    """What an agent says at its end, in a folder of its own and with nothing of this machine's."""
    place, home = folder / "place", folder / "home"
    place.mkdir()
    home.mkdir()
    environment |= {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(folder)}
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        **{"cwd": place, "env": environment, "stdin": subprocess.DEVNULL, "timeout": 300},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (place / "answer.txt").read_text() == "42\n", done.stdout + done.stderr
    return done.stdout


def rows(ledger: Ledger, task: str) -> list[ExportedReply]:
    return [
        each for page in ledger.exports.replies(Selection("default", task_id=task), everything=True) for each in page
    ]


def learnt(explorer: Service, ledger: Ledger, task: str, *, calls: int, beside: dict[str, str]) -> list[ExportedReply]:
    """The replies of a task's run that its thumb made trainable; `beside` are others of it, and why they are not."""
    wait_for(lambda: len(rows(ledger, task)) == calls + len(beside), why="not all of the run is recorded")
    thumb = httpx.post(f"{explorer.url}/feedback", json={"task_id": task, "run_id": "0", "value": True}).json()
    found = [each for each in rows(ledger, task) if each.msg_id not in beside]
    reached = thumb["replies"][f"{task}/0"]
    assert (reached["count"], sorted(reached["msg_ids"])) == (calls, sorted(each.msg_id for each in found)), thumb
    commit(explorer.url)
    now = {each.msg_id: each for each in rows(ledger, task)}
    assert {name: now[name].reason for name in beside} == beside
    for each in (now[every.msg_id] for every in found):
        prompt, completion, logprobs = each.numbers
        assert (each.state, each.reward, each.reason, each.unsampled) == (State.COMMITTED, 1.0, None, None)
        assert len(prompt) > 1000
        assert len(completion) == len(logprobs) > 1
    return found


def test_claude_code_goes_through_a_task(explorer: Service, ledger: Ledger, tmp_path: Path) -> None:
    url = run_url(explorer, "claude")
    said = run(
        tmp_path,
        *("claude", "--print", "Write 42 into answer.txt.", "--allowedTools", "Bash", "--model", SONNET),
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_DEFAULT_HAIKU_MODEL=HAIKU,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert said.strip() == DONE
    title = httpx.post(f"{url}/v1/messages", json=TITLE, timeout=300)
    small = httpx.post(f"{url}/v1/messages", json=TITLE | {"model": HAIKU, "output_config": {}}, timeout=300)
    assert (title.json()["model"], small.json()["model"]) == (SONNET, HAIKU), title.text + small.text
    beside = {title.json()["id"]: "side_request", small.json()["id"]: "opt_out"}
    turns = learnt(explorer, ledger, "claude", calls=2, beside=beside)
    # Who it was is a device, whatever the session.
    assert all(len(each.user or "") == 64 for each in turns)
    assert [bool(each.tool_calls) for each in turns] == [True, False]


def test_codex_goes_through_a_task(explorer: Service, ledger: Ledger, tmp_path: Path) -> None:
    settings = {"name": "tuneloop", "base_url": f"{run_url(explorer, 'codex')}/v1", "wire_api": "responses"}
    provider = ",".join(f'{name}="{value}"' for name, value in settings.items())
    said = run(
        tmp_path,
        *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("-c", f"model_providers.tuneloop={{{provider}}}", "-c", "model_provider=tuneloop", "-m", MODEL),
        "Write 42 into answer.txt.",
    )
    assert DONE in said
    turns = learnt(explorer, ledger, "codex", calls=2, beside={})
    assert all(json.loads(each.request)["store"] is False for each in turns)
    assert [bool(each.tool_calls) for each in turns] == [True, False]


def test_other_names_of_the_model_are_listed(explorer: Service) -> None:
    with httpx.Client(base_url=explorer.url) as http:
        assert [each["id"] for each in http.get("/v1/models").json()["data"]] == [MODEL, HAIKU, SONNET]
        for name in (MODEL, SONNET):
            assert http.get(f"/v1/models/{name}").json()["id"] == name
