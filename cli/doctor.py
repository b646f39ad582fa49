"""The commands `tuneloop doctor` and `tuneloop explain`."""

from contextlib import closing
from typing import Annotated

import typer

from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json, existing_ledger
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.operations.doctor import as_json, as_text, examine_experiment
from tuneloop.shared.operations.explain import explain as explain_reply
from tuneloop.shared.settings.loader import read_settings


def doctor(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Report whether the ledger balances, what waits where, and why no step is happening.

    Exit code 1 if it does not balance, is older than what was made with it, or is half restored.
    """
    settings = read_settings(config, set_ or ()).valid_settings()
    report = examine_experiment(settings)
    if for_programs:
        echo_json(as_json(report))
    else:
        echo("\n".join(as_text(report, settings)))
    if report.facts.ledger is None:
        raise EnvironmentRefused(report.facts.away)
    if report.imbalance or report.older or report.restoring:
        raise typer.Exit(1)


def explain(
    msg_id: Annotated[str, typer.Argument(help="The id of a reply; ID:1 is its second choice.")],
    config: ConfigOption,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Tell what happened to one reply, and what it waits for. Exit code 1: the ledger does not have it."""
    settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        found = explain_reply(ledger, settings, msg_id)
    if for_programs:
        echo_json(found.as_json())
    else:
        echo("\n".join(found.lines))
    raise typer.Exit(0 if found.replies else 1)
