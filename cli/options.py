"""What the commands share: the options that name the settings, the way to the ledger, and how text is printed."""

import getpass
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.logging import visible
from tuneloop.shared.settings.database_url import without_password
from tuneloop.shared.settings.loader import read_settings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import umask_of

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", metavar="X.yaml", help="The settings file; X.yaml alone will do.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one option, such as explorer.proxy_port=80.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


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


def echo_json(value: object) -> None:
    """Print a value for programs."""
    echo(json.dumps(value, indent=2))


def open_to_group(settings: Settings) -> None:
    """Let the files that are made from here on have the rights that those of the services have."""
    os.umask(umask_of(settings.trainer.checkpoint_mode))


def echo(text: str, *, err: bool = False) -> None:
    """Print lines; what strangers wrote into them cannot command the terminal."""
    typer.echo(visible(text, keep="\n\t"), err=err)


def operator_name() -> str:
    """Who gives a command, for the record. Where containers run under any user id, no file has its name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the latter since Python 3.13
        return f"uid {os.getuid()}"
