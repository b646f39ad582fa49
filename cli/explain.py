"""This file is `tuneloop explain`."""

from contextlib import closing
from typing import Annotated

import typer

from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json, existing_ledger
from tuneloop.shared.operations.explain import explain as explain_reply


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
