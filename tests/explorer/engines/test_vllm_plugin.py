"""How an engine's processes wait for each other, and how they are started, with a real vLLM."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from tuneloop.explorer.engines.vllm import engine_variables
from tuneloop.explorer.engines.vllm_plugin import FORKS, SLEEPS
from tuneloop.shared.settings.settings import Settings

#: vLLM is imported once, and each environment tried in a process that is forked from there.
_ASK = """
import json, os, sys
from vllm.distributed import utils
from vllm.plugins import load_general_plugins
from vllm.utils import system_utils

for variables in json.loads(sys.stdin.read()):
    if not os.fork():
        os.environ.update(variables)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as vLLM does when it computes on a CPU
        load_general_plugins()
        told = ["yields" if utils.USE_SCHED_YIELD else "sleeps", system_utils.get_mp_context().get_start_method()]
        print(json.dumps(told), flush=True)
        os._exit(0)
    os.wait()
"""


class Case(NamedTuple):
    """How many GPUs there are, and what the environment says of the plugin."""

    gpus: int
    given: str | None


#: How the processes of an engine of ours wait, and how they are started.
EXPECTED = {
    Case(0, None): ["sleeps", "fork"],
    Case(0, "0"): ["yields", "spawn"],
    Case(1, None): ["yields", "spawn"],
}


def variables_of(case: Case) -> dict[str, str]:
    values = {"mode": "serve", "model": {"model_path": "m"}, "cluster": {"gpu_per_node": case.gpus}}
    with pytest.MonkeyPatch.context() as patch:
        for name in (SLEEPS, FORKS):
            patch.delenv(name, raising=False)
            if case.given is not None:
                patch.setenv(name, case.given)
        return engine_variables(Settings.model_validate(values))


@pytest.fixture(scope="module")
def told() -> dict[Case, list[str]]:
    """What vLLM says in each case."""
    without = {name: value for name, value in os.environ.items() if name not in {SLEEPS, FORKS}}
    asked = subprocess.run(
        [sys.executable, "-c", _ASK],
        input=json.dumps([variables_of(case) for case in EXPECTED]),
        env=without,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [line for line in asked.stdout.splitlines() if line.startswith("[")]
    return dict(zip(EXPECTED, map(json.loads, answers), strict=True))


@pytest.mark.vllm
@pytest.mark.parametrize("case", EXPECTED, ids=str)
def test_engines_on_a_cpu_leave_the_processor_while_they_wait(told: dict[Case, list[str]], case: Case) -> None:
    assert told[case][0] == EXPECTED[case][0]


@pytest.mark.vllm
@pytest.mark.parametrize("case", EXPECTED, ids=str)
def test_the_processes_of_engines_on_a_cpu_are_forked(told: dict[Case, list[str]], case: Case) -> None:
    assert told[case][1] == EXPECTED[case][1]
