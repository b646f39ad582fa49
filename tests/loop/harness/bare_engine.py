"""A vLLM of its own, as the explorer would start it, for tests of what vLLM itself answers."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.loop.harness.services import client_on, wait_for, write_settings
from tuneloop.explorer.engines import vllm
from tuneloop.shared.settings.loader import load_settings

#: Its name for the model.
MODEL = "tiny"

_ROLLOUT_MODEL = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 128 << 20,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "engine_args": [
        *("--served-model-name", MODEL),
        # Tokens are bytes: a request with tools has some two thousand.
        *("--max-model-len", "4096"),
        # Without it vLLM refuses to generate from token ids.
        "--enable-scale-out",
    ],
}


@pytest.fixture(scope="session")
def bare_engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[httpx.Client]:
    """A client of the engine, all of whose routes answer, those that need a flag or the responses store too."""
    folder = tmp_path_factory.mktemp("bare")
    settings = load_settings(write_settings(folder, model, explorer={"rollout_model": _ROLLOUT_MODEL}))
    listening, said = folder / "engine.sock", folder / "engine.log"
    with said.open("wb") as log:
        engine = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tuneloop.explorer.engines.guard",
                *vllm.command(settings, model=model, socket=listening),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**vllm.environment(settings, 0), "VLLM_ENABLE_RESPONSES_API_STORE": "1"},
        )
    assert engine.stdin is not None

    def ready() -> bool:
        assert engine.poll() is None, said.read_text()
        with socket.socket(socket.AF_UNIX) as knocking:
            return knocking.connect_ex(str(listening)) == 0

    try:
        wait_for(ready, timeout_s=240, why=f"the engine did not start: {said}")
        with client_on(listening) as client:
            wait_for(lambda: client.get("/health").status_code == 200, why=f"the engine is not healthy: {said}")
            yield client
    finally:
        engine.stdin.close()
        engine.wait(30)
