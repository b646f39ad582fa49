"""What the commands share: options, the way to the ledger, how text is printed, and how far long work is."""

import getpass
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.logging import visible
from tuneloop.shared.settings.database_url import without_password
from tuneloop.shared.settings.loader import read_settings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import umask_of

_T = TypeVar("_T")

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", metavar="X.yaml", help="The settings file; X.yaml alone will do.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one option, such as explorer.proxy_port=80.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
OptionalConfig = Annotated[Path | None, typer.Option("--config", "-c", metavar="X.yaml", help="The settings file.")]
TenantOption = Annotated[str, typer.Option(help="Whose replies; of imported conversations, whose they become.")]

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

#: Rows between two updates of the progress: one for each would take longer than the row.
_STEP = 200


def seconds(duration: str) -> float:
    """The seconds of 30d, 12h, 45m, 90s, or of a plain number. Raises typer.BadParameter for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", duration, re.ASCII)
    if match is None:
        raise typer.BadParameter(f"{duration!r} is not a duration; write 30d, 12h, 45m or 90s")
    return float(match[1]) * _UNITS[match[2]]


@contextmanager
def existing_ledger(config: Path, overrides: Sequence[str] | None) -> Iterator[tuple[Settings, Ledger]]:
    """The settings and their ledger. Raises EnvironmentRefused unless it is theirs, with the newest schema."""
    settings = read_settings(config, overrides or ()).valid_settings()
    there = revisions.current(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
    if there != revisions.newest():
        raise EnvironmentRefused(
            f"the database {without_password(settings.database_url)} has the schema {there or 'of no release'}, this"
            f" release works with {revisions.newest()}: start a service, or run tuneloop db upgrade"
        )
    with closing(Ledger.of(settings)) as ledger:
        ledger.require_owner(settings.project, settings.name)
        yield settings, ledger


def echo_json(value: object) -> None:
    echo(json.dumps(msgspec.to_builtins(value), indent=2))


def tell(value: object, *lines: str, for_programs: bool) -> None:
    echo_json(value) if for_programs else echo("\n".join(lines))


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


def with_progress(rows: Iterable[_T], label: str, *, step: int = _STEP) -> Iterator[_T]:
    """The rows; on a terminal's error stream, and nowhere else, a line counts every `step` of them."""
    if not sys.stderr.isatty():
        yield from rows
        return
    with _bar(rows, label, update_min_steps=step) as shown:
        yield from shown


@contextmanager
def counting(label: str) -> Iterator[Callable[[int], object]]:
    """What is to be called with the rows that are done, whenever some are."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    with _bar(iter(int, 1), label) as bar:
        yield bar.update


def _bar(rows: Iterable[_T], label: str, **how: Any) -> Any:
    return typer.progressbar(rows, label=label, file=sys.stderr, show_eta=False, show_pos=True, **how)
