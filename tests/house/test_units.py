"""deploy/systemd: systemd takes the units, and they start what the command line starts, with its exit codes."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sources import ROOT

from tuneloop.shared.errors import SettingsError, StaleEpoch
from tuneloop.shared.settings.loader import read_settings

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
EXECUTABLE = "/opt/tuneloop/.venv/bin/tuneloop"

assert [each.stem for each in UNITS] == ["tuneloop-explorer", "tuneloop-trainer"]

pytestmark = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)

needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze") and not os.environ.get("CI"),
    reason="systemd-analyze is not installed (Debian, Ubuntu: apt install systemd)",
)


def entries(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


def verified(unit: Path, folder: Path, text: str) -> list[str]:
    """What systemd says of a unit, where the executable that it names is there."""
    executable = folder / "tuneloop"
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    there = folder / unit.name
    there.write_text(text.replace(EXECUTABLE, str(executable)))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(there)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in done.stderr.splitlines() if unit.name in line or str(there) in line]
    return said if said or not done.returncode else [done.stderr]


@needs_systemd
def test_systemd_takes_it(unit: Path, tmp_path: Path) -> None:
    assert verified(unit, tmp_path, unit.read_text()) == []


@needs_systemd
def test_what_systemd_does_not_take_is_found(unit: Path, tmp_path: Path) -> None:
    wrong = unit.read_text().replace("KillMode=mixed", "KillMode=mxied\nNoNewPrivilegs=yes")
    said = "\n".join(verified(unit, tmp_path, wrong))
    assert "mxied" in said
    assert "NoNewPrivilegs" in said


def test_it_starts_one_service(unit: Path, tmp_path: Path) -> None:
    [started] = entries(unit, "ExecStart")
    [override] = re.findall(r"--set (\S+)", started)
    assert started == f"{EXECUTABLE} run --config /etc/tuneloop/tuneloop.yaml --set {override}"
    (tmp_path / "tuneloop.yaml").write_text("model: {model_path: m}\n")
    settings = read_settings(tmp_path / "tuneloop.yaml", [override], environment={}).settings
    assert settings is not None
    assert settings.mode == {"tuneloop-explorer": "serve", "tuneloop-trainer": "train"}[unit.stem]


def test_what_would_fail_again_is_not_started_again(unit: Path) -> None:
    for_good = {SettingsError.exit_code} | ({StaleEpoch.exit_code} if "trainer" in unit.stem else set())
    assert [set(map(int, codes.split())) for codes in entries(unit, "RestartPreventExitStatus")] == [for_good]


def test_it_has_as_much_time_to_stop_as_it_takes(unit: Path) -> None:
    """The explorer's workers take 45 s at most, its engines 15 s; a step of the trainer takes what it takes."""
    assert [int(seconds) >= 75 for seconds in entries(unit, "TimeoutStopSec")] == [True]
    assert entries(unit, "KillMode") == ["mixed"]
