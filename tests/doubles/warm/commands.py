"""A process that has imported what many tests start a Python for, and from which they fork instead."""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["tuneloop.explorer.versions.verifier", "tuneloop.cli.main"])


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
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "output"), Path(folder, "errors")
        variables = dict(os.environ if environment is None else environment)
        words = [str(each) for each in arguments]
        process = WARM.Process(target=_run, args=(words, cwd, variables, files, umask))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"tuneloop {words} did not end in {timeout_s} s")
        code = process.exitcode
        process.close()
        return Ended(code, *(file.read_text() for file in files))


def _run(
    arguments: Sequence[str],
    cwd: Path | None,
    environment: Mapping[str, str],
    files: tuple[Path, Path],
    umask: int | None,
) -> None:
    if umask is not None:
        os.umask(umask)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["tuneloop", *arguments]

    from tuneloop.cli.main import main

    main()
