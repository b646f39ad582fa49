"""This file is the options that say how services log; they go on to the services as variables."""

import os
from typing import Annotated

import typer

from tuneloop.shared.logging import JSON_VARIABLE, LEVEL_VARIABLE, LogLevel

LogLevelOption = Annotated[LogLevel | None, typer.Option("--log-level", help="The least level that is logged.")]
LogJsonOption = Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")]


def hand_on_log_options(level: LogLevel | None, *, log_json: bool) -> None:
    """Have the processes that are started from here log so; without an option, as the environment says."""
    if level is not None:
        os.environ[LEVEL_VARIABLE] = level.value
    if log_json:
        os.environ[JSON_VARIABLE] = "1"
