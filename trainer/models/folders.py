"""Whether the models that the settings name are there. It can be told without torch, in no time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.base_model import require_trainable
from tuneloop.shared.settings.settings import Settings


def require_folders(settings: Settings) -> None:
    """Raise EnvironmentRefused unless the models to start from are there, SettingsError if the base is not trained."""
    for setting, folder in named_folders(settings).items():
        if not ((folder / "config.json").is_file() and any(folder.glob("*.safetensors"))):
            what = "is not a model folder" if folder.is_dir() else "is not there"
            raise EnvironmentRefused(
                f"{setting}: {folder} {what}; name a local folder that holds config.json and *.safetensors"
            )
    require_trainable(settings)


def named_folders(settings: Settings) -> dict[str, Path]:
    """The models that the settings name, by the setting."""
    model, algorithm = settings.model, settings.algorithm
    named = {"model.model_path": model.model_path}
    if algorithm.algorithm_type == "distill" and algorithm.distill.teacher_path is not None:
        named["algorithm.distill.teacher_path"] = algorithm.distill.teacher_path
    return named


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
