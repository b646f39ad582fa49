"""This file is `tuneloop spool`: the records that the database refused, and the way back for them."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json, existing_ledger
from tuneloop.shared.errors import LedgerError, LedgerUnavailable, TuneloopError
from tuneloop.shared.experience import Exchange, Record
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.operations.diagnosis import moment
from tuneloop.shared.quarantine import Piece, Retried, pieces_below, retry
from tuneloop.shared.settings.loader import read_settings
from tuneloop.shared.spool_format import slots

app = typer.Typer(
    help="The records that the database refused, in this machine's spool.", no_args_is_help=True, cls=CommandGroup
)

_Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="As list prints them; none: all.")]


@app.command("list")
def list_(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """List what is in quarantine, a line each: name, slot, kind, reply, when it was received. No text of a user."""
    root = read_settings(config, set_ or ()).valid_settings().spool_dir
    if for_programs:
        echo_json([_as_json(slot, piece) for slot, piece in pieces_below(root)])
        return
    echo("\n".join(_line(slot, piece) for slot, piece in pieces_below(root)) or "nothing is in quarantine")


@app.command()
def show(name: Annotated[str, typer.Argument(help="As list prints it.")], config: ConfigOption) -> None:
    """Print one record as JSON, with everything that users wrote."""
    root = read_settings(config).valid_settings().spool_dir
    for _slot, piece in pieces_below(root):
        if piece.name == name:
            echo(msgspec.json.encode(piece.record if piece.record is not None else piece.data).decode())
            return
    raise TuneloopError(f"no record {name} is in quarantine below {root}")


@app.command("retry")
def retry_(
    config: ConfigOption, names: _Names = None, set_: SetOption = None, for_programs: JsonOption = False
) -> None:
    """Offer records to the database again; those that it takes leave the quarantine. Exit code 1 if it refuses any."""
    settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        done = list(_retry_all(settings.spool_dir, ledger.recording, names or ()))
    refused = [each for each in done if each.refused is not None]
    for each in refused:
        echo(f"{each.piece.name}: {each.refused}", err=True)
    if for_programs:
        echo_json({"taken": len(done) - len(refused), "refused": {each.piece.name: each.refused for each in refused}})
    else:
        echo(f"{len(done) - len(refused)} records are in the database now, {len(refused)} are still refused")
    if refused:
        raise typer.Exit(1)


def _retry_all(root: Path, recording: Recording, names: Sequence[str]) -> Iterator[Retried]:
    def record(each: Record) -> None:
        try:
            recording.record([each])
        except LedgerUnavailable:
            raise
        except (LedgerError, OverflowError) as error:
            raise ValueError(str(error)) from error

    unknown = set(names) - {piece.name for _slot, piece in pieces_below(root)}
    if unknown:
        raise TuneloopError(f"not in quarantine below {root}: {', '.join(sorted(unknown))}")
    for slot in slots(root):
        yield from retry(slot, lambda piece: not names or piece.name in names, record)


def _as_json(slot: Path, piece: Piece) -> dict[str, object]:
    record = piece.record
    if record is None:
        return {"name": piece.name, "slot": slot.name, "kind": None, "bytes": len(piece.data)}
    return {
        "name": piece.name,
        "slot": slot.name,
        "kind": _kind(record),
        "about": _about(record),
        "received_at": record.received_at,
    }


def _kind(record: Record) -> str:
    return "exchange" if isinstance(record, Exchange) else "feedback"


def _about(record: Record) -> str:
    return record.msg_id or f"{record.task_id}/{record.run_id}"


def _line(slot: Path, piece: Piece) -> str:
    record = piece.record
    if record is None:
        return f"{piece.name}  slot {slot.name}  {len(piece.data)} bytes that are not a record of this release"
    return f"{piece.name}  slot {slot.name}  {_kind(record)}  {_about(record)}  {moment(record.received_at)}"
