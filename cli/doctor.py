"""The command `tuneloop doctor`."""

import typer

from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.operations.doctor import as_json, as_text, examine_experiment
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
