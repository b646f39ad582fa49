"""Whether the job folder is this experiment's: one that is not mounted looks like one that was never made."""

from contextlib import closing
from pathlib import Path

from tuneloop.shared.errors import EnvironmentRefused, LedgerUnavailable
from tuneloop.shared.held_files import EXPERIMENT, expect_mark
from tuneloop.shared.job_marks import SERVED, folder_mark, mark_folder
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.settings.settings import Settings


def require_folder(settings: Settings) -> None:
    """Raise EnvironmentRefused where the folder has no mark, and the database knows of one or cannot be asked."""
    job_dir, schema = settings.job_dir, settings.buffer.trainer_input.experience_buffer.name
    if folder_mark(job_dir) is not None or (job_dir / SERVED).exists():
        return
    if revisions.current(settings.database_url, schema=schema) != revisions.newest():
        return  # The database is new, or of a release that knew of no mark.
    with closing(Ledger.of(settings)) as ledger:
        try:
            known = ledger.explorers.folder()
        except LedgerUnavailable as error:
            raise EnvironmentRefused(f"the database is away, and may know of another {job_dir}: {error}") from None
    if known is not None:
        raise _is_away(job_dir, known)


def claim_folder(job_dir: Path, ledger: Ledger) -> None:
    """Make the folder this experiment's, with a mark. Raises EnvironmentRefused if another is, OSError."""
    mark = folder_mark(job_dir)
    if mark is None and (known := ledger.explorers.folder()) is not None:
        raise _is_away(job_dir, known)
    mark = mark or mark_folder(job_dir)
    if (known := ledger.explorers.take_folder(mark)) != mark:
        raise _is_away(job_dir, known)
    expect_mark(job_dir)


def _is_away(job_dir: Path, known: str | None) -> EnvironmentRefused:
    return EnvironmentRefused(
        f"checkpoint_root_dir: {job_dir} is not the folder that the database knows: {EXPERIMENT} is not there, or is"
        " another's; mount the folder. If it is lost, restore a backup, or begin with an empty one: write"
        f' {{"folder":"{known}"}} into {job_dir / EXPERIMENT}'
    )
