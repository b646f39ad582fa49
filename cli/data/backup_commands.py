"""This file is `tuneloop backup` and `tuneloop restore`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.cli.data.progress import counting_bytes
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, open_to_group
from tuneloop.shared.disk_space import gigabytes
from tuneloop.shared.operations.backup import back_up
from tuneloop.shared.operations.backup_format import BackupManifest
from tuneloop.shared.operations.diagnosis import moment, number
from tuneloop.shared.operations.restore import check_backup, restore
from tuneloop.shared.settings.loader import read_settings

_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The backup's own folder.")]


def add_to(app: typer.Typer) -> None:
    """Give the command line these two commands."""
    app.command("backup")(_backup)
    app.command("restore")(_restore)


def _backup(
    folder: _Folder,
    config: ConfigOption,
    check: Annotated[bool, typer.Option("--check", help="Write nothing: say whether FOLDER is whole.")] = False,
    as_json: JsonOption = False,
    set_: SetOption = None,
) -> None:
    """Write ledger, spool, checkpoints and key into FOLDER, as of one moment. Services may run."""
    settings = read_settings(config, set_ or ()).valid_settings()
    with counting_bytes("reading the ledger") as count:
        backup = check_backup(settings, folder, count) if check else back_up(settings, folder, on_bytes=count)
    echo(json.dumps(_as_json(folder, backup)) if as_json else "\n".join(_lines(folder, backup)))


def _restore(
    folder: _Folder,
    config: ConfigOption,
    replace: Annotated[bool, typer.Option("--replace", help="Put it in the place of what is there.")] = False,
    next_version: Annotated[
        int | None, typer.Option(min=1, help="The next version's number; else one that none published since can have.")
    ] = None,
    as_json: JsonOption = False,
    set_: SetOption = None,
) -> None:
    """Put a backup back where the settings say, after all of it was found whole. No service may run."""
    settings = read_settings(config, set_ or ()).valid_settings()
    open_to_group(settings)
    with counting_bytes("reading the backup") as count:
        backup, following = restore(settings, folder, replace=replace, next_version=next_version, on_bytes=count)
    if as_json:
        echo(json.dumps({**_as_json(folder, backup), "next_version": following}))
        return
    echo("\n".join(_lines(folder, backup)))
    echo(f"restored; the next version is {following}")


def _as_json(folder: Path, backup: BackupManifest) -> dict[str, object]:
    names = ("project", "name", "cut_at", "release", "revision", "rows", "spool_bytes", "bytes")
    versions = [each.version for each in backup.versions]
    return {"folder": str(folder), **{name: getattr(backup, name) for name in names}, "versions": versions}


def _lines(folder: Path, backup: BackupManifest) -> Iterator[str]:
    yield f"{folder}: {backup.project}/{backup.name} as of {moment(backup.cut_at)}, {gigabytes(backup.bytes)}"
    counted = ("exchanges", "experiences", "feedback")
    yield f"  {'rows':<12} {', '.join(f'{backup.rows.get(name, 0)} {name}' for name in counted)}"
    yield f"  {'spool':<12} {number(backup.spool_bytes, 'byte')}"
    yield f"  {'versions':<12} {', '.join(str(each.version) for each in backup.versions) or 'none but the base model'}"
