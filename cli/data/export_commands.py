"""This file is `tuneloop export` and `tuneloop import`."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.cli.data.export import ExportRequest, export
from tuneloop.cli.data.export_formats import Format
from tuneloop.cli.data.importing import import_file
from tuneloop.cli.options import command_of, echo, echo_json, open_to_group
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
from tuneloop.shared.settings.settings import Settings


def _timestamp(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a time; write 2026-01-31 or 2026-01-31T12:00:00+01:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, kw_only=True)
class _CommonOptions:
    config: Annotated[Path, typer.Option("--config", "-c", metavar="X.yaml", help="The settings file.")]
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one option.")] = None
    tenant: Annotated[str, typer.Option(help="Whose replies; of imported conversations, whose they become.")] = (
        "default"
    )
    for_programs: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False

    def settings(self) -> Settings:
        """The settings that the command is to use."""
        return read_settings(self.config, self.set_ or ()).valid_settings()


@dataclass(frozen=True, kw_only=True)
class _ExportOptions(_CommonOptions):
    format: Annotated[Format, typer.Option(help="What the file is for.")]
    to: Annotated[Path, typer.Option(metavar="FILE", help="A .jsonl or .parquet file; an existing one is replaced.")]
    state: Annotated[list[State] | None, typer.Option(help="Only rows in this state; may be repeated.")] = None
    min_reward: Annotated[float | None, typer.Option(help="Only rewards as high; an edited answer needs none.")] = None
    margin: Annotated[float, typer.Option(help="dpo: the least difference of the rewards of two replies.")] = 0.0
    since: Annotated[float | None, typer.Option(parser=_timestamp, metavar="ISO", help="Sampled then or later.")] = None
    until: Annotated[float | None, typer.Option(parser=_timestamp, metavar="ISO", help="Sampled then or before.")] = (
        None
    )
    task: Annotated[str | None, typer.Option(help="Only this task_id.")] = None
    all: Annotated[bool, typer.Option("--all", help="sft, kto: also replies cut off; sft: without a reward.")] = False


@dataclass(frozen=True, kw_only=True)
class _ImportOptions(_CommonOptions):
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .jsonl or .parquet file.")]


def add_to(app: typer.Typer) -> None:
    """Give the command line these two commands."""
    app.command("export")(command_of(_ExportOptions, _export))
    app.command("import")(command_of(_ImportOptions, _import))


def _export(options: _ExportOptions) -> None:
    """Write replies to a file, for SFT, DPO, KTO, or with everything that the ledger holds about them."""
    if options.format is Format.KTO and options.min_reward is not None:
        raise typer.BadParameter("kto goes by thumbs, not by rewards", param_hint="--min-reward")
    selection = Selection(options.tenant, tuple(options.state or ()), options.task, options.since, options.until)
    settings = options.settings()
    vocabulary = Vocabulary.load(settings.model.model_path)
    request = ExportRequest(options.format, selection, options.min_reward, options.margin, options.all, vocabulary)
    schema = settings.buffer.trainer_input.experience_buffer.name
    present, newest = revisions.current(settings.database_url, schema=schema), revisions.newest()
    if present is None:
        raise EnvironmentRefused("the database is empty: nothing has been recorded with these settings")
    if present != newest:
        raise EnvironmentRefused(f"the database has schema {present}, not {newest}: run tuneloop db upgrade")
    ledger = Ledger.of(settings)
    try:
        result = export(ledger, request, options.to)
    finally:
        ledger.close()
    if options.for_programs:
        echo_json({"file": str(options.to), "rows": result.rows, "left_out": dict(sorted(result.left_out.items()))})
        return
    echo(f"{options.to}: {result.rows} rows")
    for reason, count in sorted(result.left_out.items()):
        echo(f"  left out {count}: {reason}")


def _import(options: _ImportOptions) -> None:
    """Take experiences of another database in, or conversations as examples for SFT."""
    settings = options.settings()
    open_to_group(settings)
    upgrade(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
    ledger = Ledger.of(settings)
    try:
        ledger.own(settings.project, settings.name)
        redactor = Redactor.open(settings, load_key(settings.job_dir / KEY))
        result = import_file(ledger, options.file, tenant=options.tenant, redactor=redactor)
    finally:
        ledger.close()
    if options.for_programs:
        echo_json({"file": str(options.file), **result._asdict()})
        return
    echo(f"{options.file}: {result.rows} rows, {result.new} of them new")
    if result.changed_rewards:
        echo(f"  {result.changed_rewards} have another reward by this experiment's rule than in the file")
    if result.refused:
        echo(f"  {result.refused} are not taken: their people were erased, or they were deleted")
