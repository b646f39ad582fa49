"""What the commands share: how they are told the settings, and how they come to the ledger."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.shared.errors import EnvironmentRefused, SettingsError
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.settings.database_url import shown
from tuneloop.shared.settings.loader import Report, check
from tuneloop.shared.settings.settings import Settings

ConfigOption = Annotated[Path, typer.Option("--config", "-c", metavar="X.yaml", help="The settings file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one option, such as explorer.proxy_port=80.")
]


def understood_settings(report: Report) -> Settings:
    """The settings that were read. Raises SettingsError with every mistake in them."""
    if report.settings is None:
        raise SettingsError("\n".join(report.mistakes))
    return report.settings


def existing_ledger(config: Path, overrides: Sequence[str] | None) -> tuple[Settings, Ledger]:
    """The settings and their ledger. Raises EnvironmentRefused unless its schema is the newest: services may run."""
    settings = understood_settings(check(config, overrides or ()))
    there = revisions.current(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
    if there != revisions.newest():
        raise EnvironmentRefused(
            f"the database {shown(settings.database_url)} has the schema {there or 'of no release'}, this release works"
            f" with {revisions.newest()}: start a service, or run tuneloop db upgrade"
        )
    return settings, Ledger.of(settings)
