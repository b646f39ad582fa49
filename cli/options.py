"""What the commands share: the options that name the settings, and the way to the ledger."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.settings.database_url import without_password
from tuneloop.shared.settings.loader import read_settings
from tuneloop.shared.settings.settings import Settings

ConfigOption = Annotated[Path, typer.Option("--config", "-c", metavar="X.yaml", help="The settings file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one option, such as explorer.proxy_port=80.")
]


def existing_ledger(config: Path, overrides: Sequence[str] | None) -> tuple[Settings, Ledger]:
    """The settings and their ledger. Raises EnvironmentRefused unless its schema is the newest: services may run."""
    settings = read_settings(config, overrides or ()).valid_settings()
    there = revisions.current(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
    if there != revisions.newest():
        raise EnvironmentRefused(
            f"the database {without_password(settings.database_url)} has the schema {there or 'of no release'}, this"
            f" release works with {revisions.newest()}: start a service, or run tuneloop db upgrade"
        )
    return settings, Ledger.of(settings)
