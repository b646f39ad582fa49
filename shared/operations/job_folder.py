"""Whether the job folder is this experiment's, and on a file system that can do what is done there.

A folder that is not mounted looks like one that was never made.
"""

import socket
from pathlib import Path

import structlog

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.file_systems import find_lacking, network_of
from tuneloop.shared.held_files import EXPERIMENT, expect_mark
from tuneloop.shared.job_marks import folder_mark, mark_folder
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.database_url import SETTING, parse_url
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

_INSTEAD = "name PostgreSQL, postgresql://user:password@host/database"


def claim_folder(job_dir: Path, ledger: Ledger) -> None:
    """Make the folder this experiment's, with a mark. Raises EnvironmentRefused where the ledger knows of another."""
    mark = folder_mark(job_dir)
    if mark is None and ledger.explorers.folder() is None:
        mark_folder(job_dir)
        mark = folder_mark(job_dir)
    if (known := ledger.explorers.folder(mark)) != mark:
        raise EnvironmentRefused(
            f"checkpoint_root_dir: {job_dir} is not the folder that the database knows: {EXPERIMENT} is not there, or"
            " is another's; mount the folder. If it is lost, restore a backup, or begin with an empty one: write"
            f" {known} into {job_dir / EXPERIMENT}"
        )
    expect_mark(job_dir)


def require_file_systems(settings: Settings) -> None:
    """Raise EnvironmentRefused, a sentence for each, for what the file systems cannot do. Before any work."""
    problems = [
        f"checkpoint_root_dir: the file system of {settings.job_dir} {lacking}; use a local disk or NFS, and copy"
        " versions to an object store from there"
        for lacking in find_lacking(settings.job_dir)
    ]
    file = _database_file(settings)
    kind, perhaps = network_of(file) if file else (None, None)
    if kind:
        problems.append(
            f"{SETTING}: {file} is on a network file system ({kind}), where SQLite can lose or damage what several"
            f" processes write; {_INSTEAD}, or where all services run on this machine a file on its own disk,"
            " sqlite:////folder/file.db"
        )
    if perhaps:
        sentence = f"{SETTING}: {file} is on {perhaps}. If that is a network's, SQLite can lose data: {_INSTEAD}"
        log.warning("sqlite_perhaps_on_network", sentence=sentence)
    if problems:
        raise EnvironmentRefused("\n".join(problems))


def require_one_host(settings: Settings, ledger: Ledger) -> None:
    """Raise EnvironmentRefused if a service of another machine uses the same SQLite file."""
    if (file := _database_file(settings)) is None or network_of(file) == (None, None):
        return
    if others := sorted(ledger.explorers.hosts() - {socket.gethostname()}):
        raise EnvironmentRefused(
            f"{SETTING}: {', '.join(others)} uses {file} too, and SQLite is for services of one machine; {_INSTEAD}"
        )


def _database_file(settings: Settings) -> Path | None:
    url = parse_url(settings.database_url)
    return Path(url.database or "").absolute() if url.get_backend_name() == "sqlite" else None
