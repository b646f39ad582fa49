"""vLLM engines that belong to no explorer, started as it would: that takes half a minute, so tests share them.

Whoever gives one other weights gives it back those that it was started with.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loop.harness.services import free_port, wait_for, write_settings
from tuneloop.explorer.engines import vllm
from tuneloop.shared.settings.loader import load_settings

#: Its name for the model, and the key that it asks for.
MODEL, KEY = "tiny", "secret"

_ROLLOUT_MODEL = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 128 << 20,
    "single_process": True,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "engine_args": [
        *("--served-model-name", MODEL),
        *("--api-key", KEY),
        # Tokens are bytes: a request with tools has some two thousand.
        *("--max-model-len", "4096"),
        # Without it vLLM refuses to generate from token ids.
        "--enable-scale-out",
    ],
}


@pytest.fixture(scope="session")
def bare_engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[httpx.Client]:
    """A client of the engine, all of whose routes answer, those that need a flag or the responses store too."""
    with engine_on(free_port(), tmp_path_factory.mktemp("bare"), model) as client:
        yield client


@pytest.fixture(scope="session")
def second_engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[httpx.Client]:
    """A client of another such engine."""
    with engine_on(free_port(), tmp_path_factory.mktemp("second"), model) as client:
        yield client


@pytest.fixture(scope="module")
def as_it_was(bare_engine: httpx.Client, model: Path) -> Iterator[None]:
    """The engine is everybody's: it gets its weights back when the tests of a file are over."""
    yield
    put_weights(bare_engine, model)


def put_weights(engine: httpx.Client, model: Path) -> None:
    """Have an engine serve a model, whatever it has now. An explorer takes it that an engine has the base's weights."""
    for path, body in (
        ("/pause?mode=keep", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}),
        ("/reset_prefix_cache", None),
        ("/resume", None),
    ):
        engine.post(path, json=body).raise_for_status()


def attached_to(*engines: httpx.Client, **more: Any) -> dict[str, Any]:
    """What `explorer.rollout_model` says of engines that run already; their explorer's model has the name MODEL."""
    return {"engine_urls": [url_of(each) for each in engines], "engine_key": KEY, "dtype": "float32", **more}


def url_of(engine: httpx.Client) -> str:
    return str(engine.base_url).rstrip("/")


def session_of(engine: httpx.Client) -> httpx.AsyncClient:
    """A session for the routes that an engine's owner has."""
    return vllm.open_session(url=url_of(engine), socket=None, key=KEY)


@contextmanager
def engine_on(port: int, folder: Path, model: Path, **but: object) -> Iterator[httpx.Client]:
    """A client of an engine, which is killed in the end. `but` replaces settings of it."""
    settings = load_settings(write_settings(folder, model, explorer={"rollout_model": _ROLLOUT_MODEL | but}))
    said = folder / "engine.log"
    command = _on_port(vllm.command(settings, model=model, socket=folder), port)
    with said.open("wb") as log:
        engine = subprocess.Popen(
            [sys.executable, "-m", "tuneloop.explorer.engines.guard", *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**vllm.environment(settings, 0), "VLLM_ENABLE_RESPONSES_API_STORE": "1"},
        )
    assert engine.stdin is not None
    headers = {"authorization": f"Bearer {KEY}"}

    def ready() -> bool:
        assert engine.poll() is None, said.read_text()
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120) as client:
            wait_for(ready, timeout_s=240, why=f"the engine did not start: {said}")
            yield client
    finally:
        engine.stdin.close()
        engine.wait(30)


def _on_port(command: list[str], port: int) -> list[str]:
    """The command, for an engine that listens on a port instead of a socket."""
    [at] = [number for number, (before, _) in enumerate(pairwise(command)) if before == "--uds"]
    return [*command[:at], "--host", "127.0.0.1", "--port", str(port), *command[at + 2 :]]
