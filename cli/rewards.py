"""This file is `tuneloop rewards` and `tuneloop raters`: what feedback makes, and whose counts."""

from collections.abc import Iterator
from typing import Annotated

import typer

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import (
    ConfigOption,
    JsonOption,
    OptionalConfig,
    SetOption,
    counting,
    existing_ledger,
    operator_name,
    tell,
)
from tuneloop.shared.ledger.rater_decisions import RaterDecision, RaterStatus
from tuneloop.shared.ledger.recording.reward_rule import definition
from tuneloop.shared.logging import visible
from tuneloop.shared.operations.diagnosis import moment

app = typer.Typer(help="The rewards that feedback makes.", no_args_is_help=True, cls=CommandGroup)


@app.callback()
def _options() -> None:
    """The rewards that feedback makes."""


@app.command()
def recompute(
    config: ConfigOption,
    set_: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, only report what would change.")] = False,
    for_programs: JsonOption = False,
) -> None:
    """Recompute the rewards of untrained replies from their feedback, by the present rule. Services may run."""
    with existing_ledger(config, set_) as (settings, ledger), counting("examining") as count:
        result = ledger.recording.recompute_rewards(dry_run=dry_run, examined=count)
    rule, change = definition(settings.reward), "would change" if dry_run else "changed"
    told = f"{result.replies} replies examined, {result.changed} rewards {change}"
    counts = {"rule": rule, "dry_run": dry_run, "replies": result.replies, "changed": result.changed}
    tell(counts, f"rule: {rule}", told, for_programs=for_programs)


raters_app = typer.Typer(help="Who gives feedback, and whose counts.", invoke_without_command=True, cls=CommandGroup)

_NameArgument = Annotated[str, typer.Argument(help="The source of the feedback; '' is feedback without a source.")]
_ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it is kept.")]
_RaterTenant = Annotated[str, typer.Option("--tenant", help="The rater's tenant.")]
_LogOption = Annotated[bool, typer.Option("--log", help="List the decisions instead, the oldest first.")]


@raters_app.callback()
def raters(
    context: typer.Context,
    config: OptionalConfig = None,
    set_: SetOption = None,
    log: _LogOption = False,
    for_programs: JsonOption = False,
) -> None:
    """List the raters of the newest 5,000 events, those in quarantine first."""
    if context.invoked_subcommand is not None:
        return
    if config is None:
        raise typer.BadParameter("name the settings file of the experiment", param_hint="--config")
    with existing_ledger(config, set_) as (_settings, ledger):
        found = ledger.raters.decisions() if log else ledger.raters.all()
    lines = [line for each in found for line in _lines(each)] or ["there is no feedback yet"]
    tell([each._asdict() for each in found], *lines, for_programs=for_programs)


@raters_app.command()
def quarantine(
    name: _NameArgument,
    reason: _ReasonOption,
    config: ConfigOption,
    set_: SetOption = None,
    tenant: _RaterTenant = "default",
    for_programs: JsonOption = False,
) -> None:
    """Let a rater's feedback count for nothing. Services may run; rewards not trained on yet are computed again."""
    with existing_ledger(config, set_) as (_settings, ledger):
        ledger.raters.quarantine(tenant, name, by=operator_name(), reason=reason)
    told = {"tenant": tenant, "name": name, "state": "in quarantine"}
    tell(told, f"{_name(name)} is in quarantine", for_programs=for_programs)


@raters_app.command()
def release(
    name: _NameArgument,
    reason: _ReasonOption,
    config: ConfigOption,
    set_: SetOption = None,
    tenant: _RaterTenant = "default",
    for_programs: JsonOption = False,
) -> None:
    """Let a rater's feedback count again."""
    with existing_ledger(config, set_) as (_settings, ledger):
        ledger.raters.release(tenant, name, by=operator_name(), reason=reason)
    tell({"tenant": tenant, "name": name, "state": "released"}, f"{_name(name)} is released", for_programs=for_programs)


def _lines(rater: RaterStatus | RaterDecision) -> Iterator[str]:
    if isinstance(rater, RaterDecision):
        by = f"{rater.state.value} by {visible(rater.actor)}: {visible(rater.reason)}"
        yield f"{moment(rater.at)}  {_name(rater.name)}: {by}"
        return
    yield f"{_name(rater.name)} ({visible(rater.tenant)}): {rater.state.value}, {rater.events} events"
    if rater.reason is not None:
        yield f"  {visible(rater.reason)}"


def _name(name: str) -> str:
    return visible(name) or "(no source)"
