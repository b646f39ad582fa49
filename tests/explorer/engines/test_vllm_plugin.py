"""How an engine's processes wait for each other, with a real vLLM."""

import os
import subprocess
import sys

import pytest

from tuneloop.explorer.engines.vllm import engine_variables
from tuneloop.shared.settings.settings import Settings

_ASK = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed import utils
print("yields" if utils.USE_SCHED_YIELD else "sleeps")
"""


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("gpus", "given", "waits"), [(0, None, "sleeps"), (0, "0", "yields"), (1, None, "yields")], ids=str
)
def test_engines_on_a_cpu_leave_the_processor_while_they_wait(
    monkeypatch: pytest.MonkeyPatch, gpus: int, given: str | None, waits: str
) -> None:
    monkeypatch.delenv("TUNELOOP_ENGINE_SLEEPS", raising=False)
    if given is not None:
        monkeypatch.setenv("TUNELOOP_ENGINE_SLEEPS", given)
    values = {"mode": "serve", "model": {"model_path": "m"}, "cluster": {"gpu_per_node": gpus}}
    engine = subprocess.run(
        [sys.executable, "-c", _ASK],
        env={**os.environ, **engine_variables(Settings.model_validate(values))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert engine.stdout.splitlines()[-1] == waits
