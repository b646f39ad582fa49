"""This file is `tuneloop backup` and `tuneloop restore`."""

from pathlib import Path
from typing import Annotated

import typer

from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json, open_to_group
from tuneloop.shared.disk_space import gigabytes
from tuneloop.shared.operations.backup import BackupManifest, back_up, check_backup
from tuneloop.shared.operations.backup import restore as put_back
from tuneloop.shared.operations.diagnosis import moment
from tuneloop.shared.settings.loader import read_settings

_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The backup's own folder.")]


def backup(
    folder: _Folder,
    config: ConfigOption,
    check: Annotated[bool, typer.Option("--check", help="Write nothing: say whether FOLDER is whole.")] = False,
    as_json: JsonOption = False,
    set_: SetOption = None,
) -> None:
    """Write spool, database, checkpoints and key into FOLDER. Services may run."""
    settings = read_settings(config, set_ or ()).valid_settings()
    manifest = check_backup(settings, folder) if check else back_up(settings, folder)
    _tell(folder, manifest, as_json=as_json)


def restore(
    folder: _Folder,
    config: ConfigOption,
    next_version: Annotated[
        int | None, typer.Option(min=1, help="The next version's number; else one that none published since can have.")
    ] = None,
    as_json: JsonOption = False,
    set_: SetOption = None,
) -> None:
    """Put a backup back where the settings say, where nothing is yet. No service may run."""
    settings = read_settings(config, set_ or ()).valid_settings()
    open_to_group(settings)
    manifest, following = put_back(settings, folder, next_version=next_version)
    _tell(folder, manifest, as_json=as_json, next_version=following)


def _tell(folder: Path, manifest: BackupManifest, *, as_json: bool, **more: int) -> None:
    size = sum(manifest.files.values())
    if as_json:
        names = ("project", "name", "cut_at", "release", "revision", "versions")
        told = {name: getattr(manifest, name) for name in names}
        echo_json({"folder": str(folder), **told, "bytes": size, **more})
        return
    whose, when = f"{manifest.project}/{manifest.name}", moment(manifest.cut_at)
    versions = ", ".join(map(str, manifest.versions)) or "none but the base model"
    echo(f"{folder}: {whose} as of {when}, {gigabytes(size)}, versions {versions}")
    for following in more.values():
        echo(f"restored; the next version is {following}")
