"""Whether the job folder is this experiment's: one that is not mounted looks like one that was never made."""

from pathlib import Path

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.held_files import EXPERIMENT, expect_mark
from tuneloop.shared.job_marks import folder_mark, mark_folder
from tuneloop.shared.ledger.ledger import Ledger


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
