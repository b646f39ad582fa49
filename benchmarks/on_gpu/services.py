"""Starts engines and explorers for benchmarks, from this checkout, installed or not, and ends them afterwards."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.proxy.load import running
from tuneloop.explorer.engines import vllm
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings


class Clock:
    """The remaining time of a benchmark."""

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._ends = self._began + seconds

    @property
    def remaining(self) -> float:
        """In seconds; below 0 once it is over."""
        return self._ends - time.monotonic()

    def say(self, text: str) -> None:
        """Print with the seconds that have passed."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


def write_settings(path: Path, values: Mapping[str, Any]) -> Settings:
    """The settings in a file of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(values)))
    return load_settings(path)


def rollout_of(*, on_gpu: bool, memory: float, api_servers: int | None) -> dict[str, Any]:
    """What `explorer.rollout_model` says of an engine of the random model."""
    if on_gpu:
        return {"gpu_memory_utilization": memory, "api_servers": api_servers, "dtype": "bfloat16"}
    few = {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "dtype": "float32"}
    return few | ({"api_servers": api_servers} if (api_servers or 1) > 1 else {"single_process": True})


@contextmanager
def bare_engine(
    settings: Settings, model: Path, port: int, log: Path, *, env: Mapping[str, str] | None = None
) -> Iterator[int]:
    """The process of a vLLM with the flags that the explorer gives its own, but on a port; `env` adds to its own."""
    words = vllm.command(settings, model=model, socket=Path("unused"))
    at = words.index("--uds")
    words[at : at + 2] = ["--host", "127.0.0.1", "--port", str(port)]
    with running(words, log, env=vllm.environment(settings, 0) | (env or {})) as pid:
        yield pid


@contextmanager
def service(config: Path, what: str, log: Path, *, env: Mapping[str, str] | None = None) -> Iterator[int]:
    """The process of the explorer or the trainer."""
    words = [sys.executable, "-P", "-m", f"tuneloop.{what}", "--config", config]
    with running(words, log, env=env) as pid:
        yield pid


def plugin_of(url: str, model: str) -> str:
    """Whether the engine that answers there has our plugin, as one token of it tells."""

    async def ask() -> bool | None:
        async with vllm.open_session(url=url, socket=None, key=None) as session:
            control = vllm.EngineControl(session, model_name=model)
            await control.find_plugin()
        return control.packs

    return {True: "with our vLLM plugin", False: "without our vLLM plugin", None: "plugin unknown"}[asyncio.run(ask())]


def log_events(log: Path) -> Iterator[dict[str, Any]]:
    """JSON events of the services' logs in order; other lines are skipped."""
    for line in log.read_text(errors="replace").splitlines():
        if (start := line.find("{")) >= 0:
            with suppress(ValueError):
                if isinstance(event := json.loads(line[start:]), dict):
                    yield event


def tell_trouble(log: Path, clock: Clock) -> None:
    """Warnings and errors of the services, each once."""
    told = set[str]()
    for event in log_events(log):
        name = str(event.get("event"))
        if event.get("level") in {"warning", "error", "critical"} and name not in told:
            told.add(name)
            clock.say(f"the log says: {json.dumps(event)[:400]}")


def await_ready(url: str, pid: int, log: Path, *, timeout_s: float) -> None:
    """Return when the URL answers 200. Raises RuntimeError with the end of the log if it does not in time."""
    wait_for(lambda: _answers(url), pid, log, timeout_s=timeout_s, what=url)


def wait_for(what_is: Callable[[], bool], pid: int, log: Path, *, timeout_s: float, what: str) -> None:
    """Return when the condition holds. Raises RuntimeError at the process's end or the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and _is_alive(pid):
        if what_is():
            return
        time.sleep(0.25)
    how = "it took too long" if _is_alive(pid) else "its process ended"
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line and "File" not in line]
    raise RuntimeError("\n".join([f"{what}: {how}", *errors[:8], "...", *lines[-12:]]))


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _is_alive(pid: int) -> bool:
    """Whether a child of ours runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
