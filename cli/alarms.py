"""This file is `tuneloop alarms`."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json, existing_ledger
from tuneloop.shared.errors import TuneloopError
from tuneloop.shared.ledger.ledger import Alarm
from tuneloop.shared.logging import visible
from tuneloop.shared.operations.diagnosis import moment

app = typer.Typer(help="The alarms of the training.", invoke_without_command=True, cls=CommandGroup)

_OptionalConfig = Annotated[Path | None, typer.Option("--config", "-c", metavar="X.yaml", help="The settings file.")]
_AllOption = Annotated[bool, typer.Option("--all", help="Include cleared alarms.")]


@app.callback()
def alarms(
    context: typer.Context,
    config: _OptionalConfig = None,
    set_: SetOption = None,
    every: _AllOption = False,
    for_programs: JsonOption = False,
) -> None:
    """List the open alarms, the oldest first."""
    if context.invoked_subcommand is not None:
        return
    if config is None:
        raise typer.BadParameter("name the settings file of the experiment", param_hint="--config")
    _settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        alarms_ = ledger.alarms.all(cleared=every)
    if for_programs:
        echo_json([alarm._asdict() for alarm in alarms_])
        return
    echo("\n".join(line for alarm in alarms_ for line in _lines(alarm)) or "no alarm is open")


@app.command()
def clear(
    name: Annotated[str, typer.Argument(help="Its name.")],
    config: ConfigOption,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Clear an open alarm."""
    _settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        if not ledger.alarms.clear(name):
            open_ = ", ".join(alarm.name for alarm in ledger.alarms.all()) or "none"
            raise TuneloopError(f"no alarm {name} is open; open are: {open_}")
        held = ledger.alarms.promotion_held()
    if for_programs:
        echo_json({"name": name, "cleared": True, "promotion_held": held})
        return
    echo(f"{name} is cleared{'; another alarm still holds new versions back' if held else ''}")


def _lines(alarm: Alarm) -> Iterator[str]:
    state = "open" if alarm.cleared_at is None else f"cleared {moment(alarm.cleared_at)}"
    holds = ", no new version is served" if alarm.holds and alarm.cleared_at is None else ""
    yield f"{alarm.name}: raised {moment(alarm.raised_at)}, {state}{holds}"
    yield f"  {visible(alarm.reason)}"
    fields = {name: getattr(alarm, name) for name in ("step", "version", "value", "threshold")}
    if figures := ", ".join(f"{name} {value:g}" for name, value in fields.items() if value is not None):
        yield f"  {figures}"
