"""Reads the settings: a YAML file, then environment variables, then `--set` flags.

Every problem is reported at once, a line each, with its location and the nearest right name. Nothing is written or
connected.
"""

import json
import logging
import os
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from tuneloop.shared.errors import SettingsError
from tuneloop.shared.settings.problems import problems_of, sort_unknown
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.sources import OVERRIDES_VARIABLE, LocatedSource, OverridesSource, YamlSource, dotted_name

_NOT_NEEDED = (
    "explorer.rollout_model.enable_history",
    "explorer.rollout_model.enable_openai_api",
    "synchronizer.sync_interval",
    "synchronizer.sync_method",
    "trainer.save_hf_checkpoint",
    "trainer.trainer_config",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsReport:
    """What the sources say: the settings, or every problem in them."""

    settings: Settings | None
    problems: tuple[str, ...]
    not_needed: tuple[str, ...] = ()
    trinity_only: tuple[str, ...] = ()

    @property
    def warning(self) -> str | None:
        """One line that names the keys without effect, or None."""
        parts = []
        if self.not_needed:
            parts.append(f"accepted but not needed: {', '.join(self.not_needed)}")
        if self.trinity_only:
            parts.append(f"known to Trinity, not used here: {', '.join(self.trinity_only)}")
        return "settings " + "; ".join(parts) if parts else None

    def valid_settings(self) -> Settings:
        """The settings. Raises SettingsError with every problem, one a line."""
        if self.settings is None:
            raise SettingsError("\n".join(self.problems))
        return self.settings


class _SourcedSettings(BaseSettings, Settings):
    """The settings out of `sources`, of which earlier ones win."""

    model_config = SettingsConfigDict(validate_default=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources that were passed, in place of pydantic's own, which do not locate what they read."""
        return cast("tuple[LocatedSource, ...]", cast("InitSettingsSource", init_settings).init_kwargs["sources"])


def load_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a YAML file. Raises SettingsError with every problem, one a line."""
    report = read_settings(path, overrides)
    settings = report.valid_settings()
    if report.warning:
        logging.getLogger(__name__).warning(report.warning)
    return settings


def read_settings(
    path: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> SettingsReport:
    """Read `path`, the environment's TUNELOOP__SECTION__KEY variables and `key=value` overrides, later ones winning."""
    file = YamlSource(_SourcedSettings, path)
    if file.problems and not file.values:
        return SettingsReport(settings=None, problems=tuple(map(str, file.problems)))
    file.values.setdefault("model", {})  # so that what is missing is model.model_path
    environment = os.environ if environment is None else environment
    flags = [*json.loads(environment.get(OVERRIDES_VARIABLE, "[]")), *overrides]
    sources = (
        OverridesSource.of_flags(_SourcedSettings, flags),
        OverridesSource.of_environment(_SourcedSettings, environment),
        file,
    )
    for above, below in combinations(sources, 2):
        for keys in above.overridden:
            below.remove(keys)
    return _report(sources)


def _report(sources: Sequence[LocatedSource]) -> SettingsReport:
    problems = [problem for source in sources for problem in source.problems]
    locations = dict(ChainMap(*(source.locations for source in reversed(sources))))
    trinity_only: list[str] = []
    settings, errors = _validate(sources)
    if errors:
        unknown = [each for each in errors if each["type"] == "extra_forbidden"]
        wrong = [each for each in errors if each not in unknown]
        settings, contradictions = _validate_rest(sources, errors, wrong)
        for each in unknown:
            problems += sort_unknown(locations, each["loc"], each["input"], trinity_only)
        for each in [*wrong, *contradictions]:
            problems += problems_of(locations, each)
    if settings is not None:
        root = Path.cwd() / settings.checkpoint_root_dir
        settings = settings.model_copy(update={"checkpoint_root_dir": root})
    written = [dotted_name(keys) for keys in locations]
    not_needed = {key for key in written if any(key == each or key.startswith(f"{each}.") for each in _NOT_NEEDED)}
    return SettingsReport(
        settings=None if problems else settings,
        problems=tuple(str(each) for each in sorted(problems, key=lambda each: each.location)),
        not_needed=tuple(sorted(key for key in not_needed if not any(o.startswith(f"{key}.") for o in not_needed))),
        trinity_only=tuple(sorted(trinity_only)),
    )


def _validate(sources: Sequence[LocatedSource]) -> tuple[Settings | None, list[ErrorDetails]]:
    build: Callable[..., Settings] = _SourcedSettings
    try:
        return build(sources=sources), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _validate_rest(
    sources: Sequence[LocatedSource], errors: Sequence[ErrorDetails], wrong: Sequence[ErrorDetails]
) -> tuple[Settings | None, list[ErrorDetails]]:
    """The settings without what was refused, and what is still wrong between options that are right by themselves."""
    for each in errors:
        for source in sources:
            source.remove(each["loc"])
    file = sources[-1].values
    file["model"] = {"model_path": "."} | (file.get("model") or {})
    settings, left = _validate(sources)
    doubted = {str(each["loc"][-1]) for each in wrong if each["loc"]}
    reported = {each["msg"] for each in wrong}
    found = [each for each in left if not each["loc"] and each["msg"] not in reported]
    return settings, [each for each in found if not any(key in each["msg"] for key in doubted)]
