"""Job folders on file systems that cannot do what is done there, and SQLite where several machines write."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import structlog

from tests.cli.setup.test_setup import model_folder
from tests.explorer.test_main import ATTACHED, write_settings
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.operations import job_folder
from tuneloop.shared.operations.job_folder import require_file_systems, require_one_host
from tuneloop.shared.settings.settings import Settings


def settings_of(folder: Path, **but: Any) -> Settings:
    return Settings.model_validate({"checkpoint_root_dir": folder, "model": {"model_path": folder}} | but)


def refuse(code: int = errno.EPERM) -> Callable[..., NoReturn]:
    def refuse_call(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return refuse_call


def rename_files_alone(source: Any, target: Any, rename: Callable[..., None] = os.rename) -> None:
    """As FUSE file systems of object stores do, and no others."""
    if os.path.isdir(source):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    rename(source, target)


@pytest.mark.parametrize(
    ("module", "function", "stub", "lacking"),
    [
        (os, "rename", rename_files_alone, ["rename folders"]),
        (os, "replace", refuse(errno.ENOSYS), ["rename files over others"]),
        (os, "link", refuse(), ["make hard links"]),
        (os, "fsync", refuse(errno.EINVAL), ["sync files and folders"]),
        (os, "chmod", refuse(), ["change rights"]),
        (fcntl, "flock", refuse(errno.ENOLCK), ["lock files"]),
        (fcntl, "flock", lambda *_: None, ["lock files"]),  # Granted to all.
        (os, "link", refuse(errno.ENOSPC), []),  # A full disk is another matter.
        (os, "link", os.link, []),
    ],
)
def test_what_a_job_folder_cannot_do_is_a_sentence_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, function: str, stub: Any, lacking: list[str]
) -> None:
    monkeypatch.setattr(module, function, stub)
    problems = ""
    try:
        require_file_systems(settings_of(tmp_path))
    except EnvironmentRefused as error:
        problems = str(error)
    said = [f"the file system of {tmp_path}/tuneloop/default cannot {each} (" in problems for each in lacking]
    assert all(said), problems
    assert len(problems.splitlines()) == len(lacking)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [], "nothing is left of the trial"


def _problems(settings: Settings) -> list[str]:
    with pytest.raises(EnvironmentRefused) as caught:
        require_file_systems(settings)
    return str(caught.value).splitlines()


class StatfsDouble:
    """A libc for which every path is on a file system of this kind."""

    def __init__(self, kind: int) -> None:
        self._kind = kind

    def statfs(self, _path: bytes, found: Any) -> int:
        found[:8] = self._kind.to_bytes(8, "little")
        return 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [(0x6969, "NFS"), (0xFF534D42, "CIFS"), (0xFFFFFFFFFF534D42, "CIFS"), (0xFE534D42, "SMB"), (0x0BD00BD0, "Lustre")],
)
def test_sqlite_on_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, name: str
) -> None:
    monkeypatch.setattr(job_folder, "_LIBC", StatfsDouble(kind))
    (problem,) = _problems(settings_of(tmp_path))
    assert problem.startswith("buffer.trainer_input.experience_buffer.path: ")
    assert f"network file system ({name})" in problem
    assert "postgresql://" in problem
    elsewhere = {"experience_buffer": {"path": "postgresql://user@host/database"}}
    require_file_systems(settings_of(tmp_path, buffer={"trainer_input": elsewhere}))
    monkeypatch.setattr(job_folder, "_LIBC", StatfsDouble(0xEF53))
    require_file_systems(settings_of(tmp_path))


def test_what_may_be_a_network_is_a_warning_and_refused_to_a_second_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path)
    monkeypatch.setattr(job_folder, "_LIBC", StatfsDouble(0x65735546))
    with structlog.testing.capture_logs() as logged:
        require_file_systems(settings)
    assert [(each["event"], "is on FUSE." in each["sentence"]) for each in logged] == [
        ("sqlite_perhaps_on_network", True)
    ]
    database.upgrade(settings.database_url, schema="exp_buffer")
    ledger = Ledger.of(settings)
    require_one_host(settings, ledger)
    ledger.explorers.see(settings.explorer_name, address="", release="", version=None)
    require_one_host(settings, ledger)
    ledger.training.take_epoch("node-7:4711")
    with pytest.raises(EnvironmentRefused, match=r"node-7 uses .* too, and SQLite is for services of one machine"):
        require_one_host(settings, ledger)
    ledger.explorers.see("node-8:8010", address="", release="", version=None)
    with pytest.raises(EnvironmentRefused, match="node-7, node-8 uses"):
        require_one_host(settings, ledger)
    monkeypatch.setattr(job_folder, "_LIBC", StatfsDouble(0xEF53))
    require_one_host(settings, ledger)
    ledger.close()


STUB = """
#include <errno.h>
#include <string.h>
int statfs(const char *path, void *found) {
    memset(found, 0, 120); *(unsigned long *) found = 0x6969; return 0;
}
int link(const char *one, const char *other) { errno = EPERM; return -1; }
int linkat(int a, const char *one, int b, const char *other, int flags) { errno = EPERM; return -1; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("service", ["explorer", "trainer"])
def test_both_services_refuse_before_they_make_anything(tmp_path: Path, service: str) -> None:
    (tmp_path / "stub.c").write_text(STUB)
    stub = tmp_path / "stub.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", stub, tmp_path / "stub.c"], check=True)
    path = write_settings(tmp_path, **ATTACHED)
    shutil.rmtree(tmp_path / "model")
    model_folder(tmp_path / "model")
    command = [sys.executable, "-m", f"tuneloop.{service}", "--config", str(path)]
    environment = os.environ | {"LD_PRELOAD": str(stub)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == EnvironmentRefused.exit_code, run.stderr
    assert "cannot make hard links (Operation not permitted)" in run.stderr
    assert "network file system (NFS)" in run.stderr
    assert not (tmp_path / "checkpoints").exists()
