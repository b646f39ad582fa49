"""What the trainer says where the disk refuses its folders."""

from collections.abc import Iterator
from contextlib import contextmanager

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings


@contextmanager
def disk_errors_as_refusals(settings: Settings) -> Iterator[None]:
    """Raise EnvironmentRefused for what the operating system refuses."""
    try:
        yield
    except OSError as error:
        raise EnvironmentRefused(
            f"checkpoint_root_dir: the disk refuses the trainer: {error}; it needs room and the right to write in "
            f"{settings.job_dir}. Make both so and start it again: nothing is lost"
        ) from error
