"""This file is `tuneloop raters`."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import (
    ConfigOption,
    JsonOption,
    SetOption,
    echo,
    echo_json,
    existing_ledger,
    operator_name,
)
from tuneloop.shared.ledger.rater_decisions import RaterStatus
from tuneloop.shared.logging import visible
from tuneloop.shared.operations.diagnosis import moment

app = typer.Typer(help="Who gives feedback, and whose counts.", invoke_without_command=True, cls=CommandGroup)

_OptionalConfig = Annotated[Path | None, typer.Option("--config", "-c", metavar="X.yaml", help="The settings file.")]
_NameArgument = Annotated[str, typer.Argument(help="The source of the feedback; '' is feedback without a source.")]
_ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it is kept.")]
_TenantOption = Annotated[str, typer.Option("--tenant", help="The rater's tenant.")]
_LogOption = Annotated[bool, typer.Option("--log", help="List the decisions instead, the oldest first.")]


@app.callback()
def raters(
    context: typer.Context,
    config: _OptionalConfig = None,
    set_: SetOption = None,
    log: _LogOption = False,
    for_programs: JsonOption = False,
) -> None:
    """List the raters of the newest 5,000 events, those in quarantine first."""
    if context.invoked_subcommand is not None:
        return
    if config is None:
        raise typer.BadParameter("name the settings file of the experiment", param_hint="--config")
    _settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        if for_programs:
            found = ledger.raters.decisions() if log else ledger.raters.all()
            echo_json([each._asdict() for each in found])
            return
        if log:
            lines = [
                f"{moment(each.at)}  {_name(each.name)}: {each.state.value} by {visible(each.actor)}:"
                f" {visible(each.reason)}"
                for each in ledger.raters.decisions()
            ]
        else:
            lines = [line for each in ledger.raters.all() for line in _lines(each)]
    echo("\n".join(lines) or "nobody has given feedback yet")


@app.command()
def quarantine(
    name: _NameArgument,
    reason: _ReasonOption,
    config: ConfigOption,
    set_: SetOption = None,
    tenant: _TenantOption = "default",
    for_programs: JsonOption = False,
) -> None:
    """Let a rater's feedback count for nothing. Services may run; rewards not trained on yet are made anew."""
    _settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        ledger.raters.quarantine(tenant, name, by=operator_name(), reason=reason)
    _tell(tenant, name, "in quarantine", for_programs=for_programs)


@app.command()
def release(
    name: _NameArgument,
    reason: _ReasonOption,
    config: ConfigOption,
    set_: SetOption = None,
    tenant: _TenantOption = "default",
    for_programs: JsonOption = False,
) -> None:
    """Let a rater's feedback count again."""
    _settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        ledger.raters.release(tenant, name, by=operator_name(), reason=reason)
    _tell(tenant, name, "released", for_programs=for_programs)


def _tell(tenant: str, name: str, state: str, *, for_programs: bool) -> None:
    if for_programs:
        echo_json({"tenant": tenant, "name": name, "state": state})
    else:
        echo(f"{_name(name)} is {state}")


def _lines(rater: RaterStatus) -> Iterator[str]:
    yield f"{_name(rater.name)} ({visible(rater.tenant)}): {rater.state.value}, {rater.events} events"
    if rater.reason is not None:
        yield f"  {visible(rater.reason)}"


def _name(name: str) -> str:
    return visible(name) or "(no source)"
