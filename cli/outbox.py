"""The commands for an outbox: what waits in it, what the database refused, and how a left-over folder is drained."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json, existing_ledger
from tuneloop.shared.experience import Record, decode
from tuneloop.shared.logging import visible
from tuneloop.shared.operations.diagnosis import ago, moment, number
from tuneloop.shared.operations.outbox import name_of, refused_by_name, retry
from tuneloop.shared.outbox_status import file_status, files_of, path_of
from tuneloop.shared.settings.loader import OVERRIDES_VARIABLE

app = typer.Typer(help="What waits for the database, and what it refused.", no_args_is_help=True, cls=CommandGroup)

_Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="As list prints them.")]
_AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]
_OptionalFolder = Annotated[
    Path | None, typer.Argument(metavar="[FOLDER]", help="Of another outbox than the settings'.")
]
_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="An outbox that no explorer uses any more.")]


@app.command("list")
def list_(
    config: ConfigOption, folder: _OptionalFolder = None, set_: SetOption = None, for_programs: JsonOption = False
) -> None:
    """List the files of the outbox, then the records that the database refused, a line each. No text of a user."""
    with existing_ledger(config, set_) as (settings, ledger):
        folder, refused = folder or settings.outbox_dir, ledger.recording.refused_records()
        now, numbers = ledger.transactions.time(), ledger.recording.taken_numbers(files_of(folder))
    files = {file: file_status(path_of(folder, file), numbers.get(file, 0)) for file in files_of(folder)}
    if for_programs:
        waiting = [
            {"file": file, "records": each.records, "bytes": each.bytes, "since": each.since}
            for file, each in files.items()
        ]
        echo_json({"files": waiting, "refused": [{"name": name_of(each), **each._asdict()} for each in refused]})
        return
    for file, each in files.items():
        since = "" if each.since is None else f", the oldest for {ago(now, each.since)}"
        waits = f"{number(each.records, 'record')}, {number(each.bytes, 'byte')} not in the database yet{since}"
        echo(f"{file}  {waits if each.bytes else 'all in the database'}")
    for row in refused:
        told = f"{number(row.size, 'byte')} of {row.file}, refused {moment(row.refused_at)}: {visible(row.reason)}"
        echo(f"{name_of(row)}  {told}")
    if not files and not refused:
        echo("nothing waits, and nothing was refused")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="As list prints it.")], config: ConfigOption, set_: SetOption = None
) -> None:
    """Print one refused record as JSON, with everything that users wrote."""
    with existing_ledger(config, set_) as (_settings, ledger):
        [row] = refused_by_name(ledger, [name]).values()
        payload = ledger.recording.refused_payload(row.file, row.end_offset)
    try:
        found: Record | bytes | None = payload and decode(payload)
    except msgspec.MsgspecError:
        found = payload
    echo(msgspec.json.encode(found).decode())


@app.command("retry")
def retry_(
    config: ConfigOption,
    names: _Names = None,
    every: _AllOption = False,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Put refused records into the outbox again. Exit code 1: some are damaged bytes, which stay where they are."""
    if bool(names) is every:
        raise typer.BadParameter("give the names of records, or --all", param_hint="NAME")
    with existing_ledger(config, set_) as (settings, ledger):
        wanted = names or [name_of(each) for each in ledger.recording.refused_records()]
        done = retry(settings, ledger, refused_by_name(ledger, wanted))
    if for_programs:
        echo_json(done._asdict())
    else:
        told = f"{number(done.records, 'record')} in {settings.outbox_dir} again: an explorer there puts them into the"
        echo(f"{told} database, now or when it starts")
        for name in done.damaged:
            echo(f"{name}: damaged bytes, no record of this release", err=True)
    if done.damaged:
        raise typer.Exit(1)


@app.command()
def drain(folder: _Folder, config: ConfigOption, set_: SetOption = None) -> None:
    """Put what a left-over folder, such as another machine's volume, holds into the database. Services may run."""
    if set_:
        os.environ[OVERRIDES_VARIABLE] = json.dumps(set_)
    command = [sys.executable, "-P", "-m", "tuneloop.explorer.drain_folder", str(config), str(folder)]
    os.execv(command[0], command)
