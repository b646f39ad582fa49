"""This file is `tuneloop rewards`."""

from contextlib import closing
from typing import Annotated

import typer

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json, existing_ledger
from tuneloop.cli.progress import counting
from tuneloop.shared.ledger.recording.reward_rule import definition

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
    settings, ledger = existing_ledger(config, set_)
    with closing(ledger), counting("examining") as count:
        result = ledger.recording.recompute_rewards(dry_run=dry_run, examined=count)
    if for_programs:
        counts = {"replies": result.replies, "changed": result.changed}
        echo_json({"rule": definition(settings.reward), "dry_run": dry_run, **counts})
        return
    echo(f"rule: {definition(settings.reward)}")
    change = "would change" if dry_run else "changed"
    echo(f"{result.replies} replies examined, {result.changed} rewards {change}")
