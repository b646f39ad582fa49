"""This file is `tuneloop purge` and `tuneloop erase`."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.cli.data.erasure import Erasure, erase
from tuneloop.cli.data.progress import counting
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, existing_ledger
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import State
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.recording.retention import PurgeResult, bounds_of, bounds_of_tenants
from tuneloop.shared.privacy.detection import Detector
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.settings import Settings

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

DryRun = Annotated[bool, typer.Option("--dry-run", help="Delete nothing, only report what would be deleted.")]


def seconds(duration: str) -> float:
    """The seconds of 30d, 12h, 45m, 90s, or of a plain number. Raises typer.BadParameter for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", duration)
    if match is None:
        raise typer.BadParameter(f"{duration!r} is not a duration; write 30d, 12h, 45m or 90s")
    return float(match[1]) * _UNITS[match[2]]


def purge(
    config: ConfigOption,
    state: Annotated[State | None, typer.Option(help="Only experiences in this state.")] = None,
    older_than: Annotated[
        float | None, typer.Option(parser=seconds, metavar="30d", help="Only what was sampled longer ago.")
    ] = None,
    dry_run: DryRun = False,
    as_json: JsonOption = False,
    set_: SetOption = None,
) -> None:
    """Delete what is older than the settings' retention allows, or than --older-than. Services may run."""
    if (state is None) != (older_than is None):
        raise typer.BadParameter("--state and --older-than go together; without both, the settings' retention holds")
    settings, ledger = existing_ledger(config, set_)
    bounds, of_tenants = _bounds(settings, state, older_than)
    with closing(ledger):
        try:
            with counting("deleting") as count:
                result = ledger.retention.purge(bounds, of_tenants=of_tenants, dry_run=dry_run, deleted=count)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--state") from None
    if as_json:
        echo(json.dumps({"dry_run": dry_run, "experiences": result.experiences, "parked_feedback": result.parked}))
    else:
        echo("\n".join(_purge_lines(result, dry_run)))


def _bounds(
    settings: Settings, state: State | None, older_than: float | None
) -> tuple[dict[State, float], dict[str, dict[State, float]]]:
    """What holds for all, and what for some tenants instead."""
    if state is not None and older_than is not None:
        return {state: older_than}, {}
    return bounds_of(settings.retention), bounds_of_tenants(settings)


def _purge_lines(result: PurgeResult, dry_run: bool) -> Iterator[str]:
    if not result.experiences:
        yield "nothing is deleted: the settings' retention keeps everything; or give --state and --older-than"
        return
    yield "would delete" if dry_run else "deleted"
    for state, count in result.experiences.items():
        yield f"  {state:<10} {count} experiences"
    if State.RECORDED in result.experiences:
        yield f"  {'feedback':<10} {result.parked} events for replies that were never recorded"


def erase_(
    config: ConfigOption,
    user: Annotated[str, typer.Option(help="The person, as requests name them in `user`, or feedback as its source.")],
    tenant: Annotated[str, typer.Option(help="Whose person.")] = "default",
    dry_run: DryRun = False,
    as_json: JsonOption = False,
    set_: SetOption = None,
) -> None:
    """Delete a person everywhere, and list the versions that were trained on them. Services may run.

    Ends with 1 if something could not be reached.
    """
    settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        redactor = Redactor(Detector(settings.privacy), key=_existing_key(settings.job_dir / KEY))
        result = erase(ledger, tenant, user, redactor=redactor, dry_run=dry_run)
    echo(json.dumps(_erasure_as_json(result)) if as_json else "\n".join(_erasure_lines(result)))
    if result.problems:
        raise typer.Exit(1)


def _existing_key(path: Path) -> bytes:
    """The experiment's key. Raises EnvironmentRefused if there is none: a new one gives nobody's pseudonym."""
    if not path.exists():
        raise EnvironmentRefused(
            f"checkpoint_root_dir: {path} is missing, and with it people's pseudonyms: restore it from a copy; if it is"
            " lost, an explorer makes a new one when it starts, and who was redacted before is not found any more"
        )
    return load_key(path)


def _erasure_as_json(result: Erasure) -> dict[str, object]:
    lists = {name: [each._asdict() for each in getattr(result, name)] for name in ("versions", "files")}
    return result._asdict() | lists


def _erasure_lines(result: Erasure) -> Iterator[str]:
    yield f"{'would delete' if result.dry_run else 'deleted'} of {result.user!r} (tenant {result.tenant})"
    for name in ("exchanges", "experiences", "feedback"):
        yield f"  {name:<12} {getattr(result, name)}"
    if result.versions:
        yield "trained on them"
        for trained in result.versions:
            yield f"  version {trained.version} ({trained.state}): {trained.experiences} experiences"
        yield "  These weights and those of all later versions stay as they are: docs/privacy.md says what can be done."
    if result.files:
        yield "exported files"
        for file in result.files:
            yield f"  {file.path}: {file.removed} rows{'' if result.dry_run else ' taken out'}"
    for problem in result.problems:
        yield f"not reached: {problem}"
