"""`make audit` says, and its exit code does, whether anything was looked up."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_TABLE = "Name ID\njinja2 PYSEC-2019-217\n"


@pytest.mark.parametrize(
    ("version", "found", "printed", "code", "sentence"),
    [
        (0, 0, "", 0, "no known vulnerability in 2 of the 2 versions"),
        (0, 1, _TABLE, 1, "these versions have known vulnerabilities"),
        (1, 0, "", 2, "NOT DONE"),
        (0, 1, "Connection refused\n", 2, "NOT DONE"),
        (0, 0, "a could not be audited\nb could not be audited\n", 2, "NOT DONE"),
    ],
)
def test_nothing_looked_up_is_no_success(
    tmp_path: Path, version: int, found: int, printed: str, code: int, sentence: str
) -> None:
    for folder in ("scripts", ".venv/bin", "requirements"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "audit", tmp_path / "scripts" / "audit")
    (tmp_path / "requirements" / "lock.txt").write_text("a==1\nb==2\n")
    (tmp_path / "printed").write_text(printed)
    uv = tmp_path / ".venv" / "bin" / "uv"
    uv.write_text(f'#!/bin/sh\ncase "$*" in *--version) exit {version};; esac\ncat printed\nexit {found}\n')
    uv.chmod(0o755)
    ran = subprocess.run([tmp_path / "scripts" / "audit"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert sentence in ran.stdout
