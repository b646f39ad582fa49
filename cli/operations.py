"""The commands of those who run an experiment: doctor, explain, alarms, backup and restore."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import (
    ConfigOption,
    JsonOption,
    OptionalConfig,
    SetOption,
    echo,
    echo_json,
    existing_ledger,
    open_to_group,
    tell,
)
from tuneloop.shared.checkpoints import gigabytes
from tuneloop.shared.errors import EnvironmentRefused, TuneloopError
from tuneloop.shared.ledger.ledger import Alarm
from tuneloop.shared.logging import visible
from tuneloop.shared.operations.backup import BackupManifest, back_up, check_backup
from tuneloop.shared.operations.backup import restore as put_back
from tuneloop.shared.operations.diagnosis import moment
from tuneloop.shared.operations.doctor import as_json, as_text, examine_experiment
from tuneloop.shared.operations.explain import explain as explain_reply
from tuneloop.shared.operations.outbox import read_outbox
from tuneloop.shared.settings.loader import read_settings


def doctor(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Report whether the ledger balances, what waits where, and why no step is happening.

    Exit code 1 if it does not balance, is older than what was made with it, or is half restored.
    """
    settings = read_settings(config, set_ or ()).valid_settings()
    report = examine_experiment(settings)
    tell(as_json(report), *as_text(report, settings), for_programs=for_programs)
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
    with existing_ledger(config, set_) as (settings, ledger):
        found = explain_reply(ledger, settings, msg_id, partial(read_outbox, settings, ledger))
    tell(found.as_json(), *found.lines, for_programs=for_programs)
    raise typer.Exit(0 if found.replies else 1)


alarms_app = typer.Typer(help="The alarms of the training.", invoke_without_command=True, cls=CommandGroup)

_AllOption = Annotated[bool, typer.Option("--all", help="Include cleared alarms.")]


@alarms_app.callback()
def alarms(
    context: typer.Context,
    config: OptionalConfig = None,
    set_: SetOption = None,
    every: _AllOption = False,
    for_programs: JsonOption = False,
) -> None:
    """List the open alarms, the oldest first."""
    if context.invoked_subcommand is not None:
        return
    if config is None:
        raise typer.BadParameter("name the settings file of the experiment", param_hint="--config")
    with existing_ledger(config, set_) as (_settings, ledger):
        alarms_ = ledger.alarms.all(cleared=every)
    lines = [line for alarm in alarms_ for line in _alarm_lines(alarm)] or ["no alarm is open"]
    tell([alarm._asdict() for alarm in alarms_], *lines, for_programs=for_programs)


@alarms_app.command()
def clear(
    name: Annotated[str, typer.Argument(help="Its name.")],
    config: ConfigOption,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Clear an open alarm, of all policies."""
    with existing_ledger(config, set_) as (_settings, ledger):
        policies = {alarm.policy for alarm in ledger.alarms.all() if alarm.name == name}
        if not [policy for policy in policies if ledger.alarms.of(policy).clear(name)]:
            open_ = ", ".join(alarm.name for alarm in ledger.alarms.all()) or "none"
            raise TuneloopError(f"no alarm {name} is open; open are: {open_}")
        held = ledger.alarms.promotion_held()
    told = f"{name} is cleared{'; another alarm still holds new versions back' if held else ''}"
    tell({"name": name, "cleared": True, "promotion_held": held}, told, for_programs=for_programs)


def _alarm_lines(alarm: Alarm) -> Iterator[str]:
    state = "open" if alarm.cleared_at is None else f"cleared {moment(alarm.cleared_at)}"
    holds = ", no new version is served" if alarm.holds and alarm.cleared_at is None else ""
    yield f"{alarm.name}: raised {moment(alarm.raised_at)}, {state}{holds}"
    yield f"  {visible(alarm.reason)}"
    fields = {name: getattr(alarm, name) for name in ("step", "version", "value", "threshold")}
    fields["policy"] = alarm.policy or None
    if figures := ", ".join(f"{name} {value:g}" for name, value in fields.items() if value is not None):
        yield f"  {figures}"


_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The backup's own folder.")]


def backup(
    folder: _Folder,
    config: ConfigOption,
    check: Annotated[bool, typer.Option("--check", help="Write nothing: say whether FOLDER is whole.")] = False,
    as_json: JsonOption = False,
    set_: SetOption = None,
) -> None:
    """Write outbox, database, checkpoints and key into FOLDER. Services may run."""
    settings = read_settings(config, set_ or ()).valid_settings()
    manifest = check_backup(settings, folder) if check else back_up(settings, folder)
    _tell_backup(folder, manifest, as_json=as_json)


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
    _tell_backup(folder, manifest, as_json=as_json, next_version=following)


def _tell_backup(folder: Path, manifest: BackupManifest, *, as_json: bool, **more: int) -> None:
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
        missing = f"what was acknowledged after {when} may be missing; what outboxes still hold of it comes when their"
        echo(f"{missing} explorers start, or by `tuneloop outbox drain`")
