"""docs/vllm.md says what differs from the vLLM that is installed."""

import importlib.util
import subprocess
import sys

import pytest

from tests.house.sources import ROOT


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="the table is made from vLLM's own routes")
def test_the_table_of_what_differs_from_vllm_is_the_one_that_is_generated() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "vllm_differences.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
