"""Feedback on the very objects that client libraries make of replies, each in an environment of its own."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.packages import PLACES, ROOT
from tests.doubles.engine import MODEL
from tests.explorer.running import RunningExplorer

CLIENTS = [
    ("openai1", "openai", 3),
    ("litellm", "openai", 3),
    ("openai3", "openai", 3),
    ("openai3", "anthropic", 2),
    ("langchain", "langchain", 3),
    ("agentscope1", "agentscope1", 1),
    ("litellm", "litellm", 1),
]


@pytest.mark.parametrize(("place", "kind", "count"), CLIENTS)
def test_a_thumb_reaches_the_reply(explorer: RunningExplorer, place: str, kind: str, count: int) -> None:
    python = PLACES / place / "bin" / "python"
    assert python.exists(), f"{place} is not installed: run scripts/install-clients"
    command = [str(python), str(Path(__file__).with_name("say.py")), explorer.url, MODEL, kind]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"PYTHONPATH": str(ROOT / "build" / "links"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.split()
    assert len(said) == count
    rows = explorer.rows("SELECT msg_id FROM experiences WHERE reward = 1")
    assert {msg_id for (msg_id,) in rows} == set(said)
