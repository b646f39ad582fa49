"""This file is `tuneloop export` and `tuneloop import`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.cli.data.export import ExportRequest, export
from tuneloop.cli.data.export_formats import Format
from tuneloop.cli.data.importing import import_file
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json, open_to_group
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import State
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.export import Selection
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.ledger.storage.database import upgrade
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.privacy.vocabulary import Vocabulary
from tuneloop.shared.settings.loader import read_settings


def _timestamp(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a time; write 2026-01-31 or 2026-01-31T12:00:00+01:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_Moment = float | None
_Tenant = Annotated[str, typer.Option(help="Whose replies; of imported conversations, whose they become.")]


def export_(
    config: ConfigOption,
    format: Annotated[Format, typer.Option(help="What the file is for.")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="A .jsonl or .parquet file; an existing one is replaced.")],
    state: Annotated[list[State] | None, typer.Option(help="Only rows in this state; may be repeated.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rewards as high; an edited answer needs none.")] = None,
    margin: Annotated[float, typer.Option(help="dpo: the least difference of the rewards of two replies.")] = 0.0,
    since: Annotated[
        float | None, typer.Option(parser=_timestamp, metavar="ISO", help="Sampled then or later.")
    ] = None,
    until: Annotated[
        float | None, typer.Option(parser=_timestamp, metavar="ISO", help="Sampled then or before.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only this task_id.")] = None,
    all: Annotated[bool, typer.Option("--all", help="sft, kto: also replies cut off; sft: without a reward.")] = False,
    tenant: _Tenant = "default",
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Write replies to a file, for SFT, DPO, KTO, or with everything that the ledger holds about them."""
    if format is Format.KTO and min_reward is not None:
        raise typer.BadParameter("kto goes by thumbs, not by rewards", param_hint="--min-reward")
    selection = Selection(tenant, tuple(state or ()), task, since, until)
    settings = read_settings(config, set_ or ()).valid_settings()
    vocabulary = Vocabulary.load(settings.model.model_path)
    request = ExportRequest(format, selection, min_reward, margin, all, vocabulary)
    schema = settings.buffer.trainer_input.experience_buffer.name
    present, newest = revisions.current(settings.database_url, schema=schema), revisions.newest()
    if present is None:
        raise EnvironmentRefused("the database is empty: nothing has been recorded with these settings")
    if present != newest:
        raise EnvironmentRefused(f"the database has schema {present}, not {newest}: run tuneloop db upgrade")
    ledger = Ledger.of(settings)
    try:
        result = export(ledger, request, to)
    finally:
        ledger.close()
    if for_programs:
        echo_json({"file": str(to), "rows": result.rows, "left_out": dict(sorted(result.left_out.items()))})
        return
    echo(f"{to}: {result.rows} rows")
    for reason, count in sorted(result.left_out.items()):
        echo(f"  left out {count}: {reason}")


def import_(
    config: ConfigOption,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .jsonl or .parquet file.")],
    tenant: _Tenant = "default",
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Take experiences of another database in, or conversations as examples for SFT."""
    settings = read_settings(config, set_ or ()).valid_settings()
    open_to_group(settings)
    upgrade(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
    ledger = Ledger.of(settings)
    try:
        ledger.own(settings.project, settings.name)
        redactor = Redactor.open(settings, load_key(settings.job_dir / KEY))
        result = import_file(ledger, file, tenant=tenant, redactor=redactor)
    finally:
        ledger.close()
    if for_programs:
        echo_json({"file": str(file), **result._asdict()})
        return
    echo(f"{file}: {result.rows} rows, {result.new} of them new")
    if result.changed_rewards:
        echo(f"  {result.changed_rewards} have another reward by this experiment's rule than in the file")
    if result.refused:
        echo(f"  {result.refused} are not taken: their people were erased, or they were deleted")
