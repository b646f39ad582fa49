"""An experiment's folder: `{root}/{project}/{name}-{YYYYmmddHHMMSS}`, found again by name to go on with."""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tuneloop.runner.errors import TuneRefused
from tuneloop.runner.private_files import make_private_folder

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,80}")
_STAMP = re.compile(r"-\d{14}$")


@dataclass(frozen=True, slots=True)
class ExperimentFolder:
    """Where everything of an experiment lies."""

    path: Path

    @classmethod
    def open(cls, root: Path, project: str, experiment: str, *, resume: bool) -> Self:
        """The newest folder of that name if one is to be gone on with and there is one, else a new one.

        Raises TuneRefused for names that make no folder, and where none can be made.
        """
        for what, name in (("project_name", project), ("experiment_name", experiment)):
            if not _NAME.fullmatch(name):
                raise TuneRefused(f"{what} is {name!r}: letters, digits, '.', '_' and '-' make a folder's name")
        parent = root.absolute() / project
        if resume and (found := cls._newest(parent, experiment)):
            return cls(found)
        for moment in range(60):
            path = parent / f"{experiment}-{time.strftime('%Y%m%d%H%M%S', time.localtime(time.time() + moment))}"
            try:
                make_private_folder(path)
                return cls(path)
            except FileExistsError:
                continue
            except OSError as error:
                raise TuneRefused(f"checkpoint_root_dir: {path} cannot be made: {error.strerror}") from None
        raise TuneRefused(f"{parent} has a folder of that name for each second of the next minute")

    @staticmethod
    def _newest(parent: Path, experiment: str) -> Path | None:
        names = [each for each in parent.glob(f"{experiment}-*") if _STAMP.search(each.name)]
        journals = [each for each in names if _STAMP.sub("", each.name) == experiment and journal_in(each).exists()]
        return max(journals, key=lambda each: each.name, default=None)

    @property
    def name(self) -> str:
        """Its name with the time at which it was begun; what the service calls `name`."""
        return self.path.name

    @property
    def journal(self) -> Path:
        """What was rewarded, acknowledged and committed."""
        return journal_in(self.path)

    @property
    def tensorboard(self) -> Path:
        """Where `tensorboard --logdir` finds its curves."""
        return self.path / "monitor" / "tensorboard"

    def settings(self, model: str) -> Path:
        """The settings file of the service that trains a model."""
        return self.path / "tune" / f"{model}.yaml"

    def log(self, model: str) -> Path:
        """The log of the service that trains a model."""
        return self.path / "tune" / f"{model}.log"


def journal_in(path: Path) -> Path:
    """The journal in an experiment's folder."""
    return path / "tune" / "journal.jsonl"
