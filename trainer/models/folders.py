"""Converts disk errors of the trainer to refusals."""

from collections.abc import Iterator
from contextlib import contextmanager

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings


@contextmanager
def disk_errors_as_refusals(settings: Settings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentRefused(
            f"checkpoint_root_dir: the disk failed: {error}; the trainer needs free space and write access in "
            f"{settings.job_dir}. Provide both and restart it: nothing is lost"
        ) from error
