"""The command `tuneloop`, in processes that are forked."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.doubles.warm.process import WarmProcess

_TUNELOOP = (sys.executable, str(Path(sys.executable).with_name("tuneloop")))


class Ended(NamedTuple):
    """How a command has ended, and what it printed."""

    code: int
    output: str
    errors: str


def run_tuneloop(
    *arguments: object,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    umask: int | None = None,
    timeout_s: float = 120,
) -> Ended:
    """Run the command `tuneloop` in a process of its own; without an `environment` it has ours."""
    command, pipe = [*_TUNELOOP, *map(str, arguments)], subprocess.PIPE
    with WarmProcess(
        command, cwd=cwd, env=environment, umask=-1 if umask is None else umask, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return Ended(process.returncode, output, errors)
