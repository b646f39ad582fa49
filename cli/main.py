"""This file is the command `tuneloop`."""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, NoReturn, assert_never

import typer
import yaml

from tuneloop.cli import alarms, doctor, keys, raters, refused_records, rewards, versions
from tuneloop.cli.both import supervise
from tuneloop.cli.data import backup_commands, export_commands
from tuneloop.cli.data.retention_commands import add_to as add_retention
from tuneloop.cli.options import ConfigOption, SetOption, echo, existing_ledger, open_to_group
from tuneloop.cli.package_names import refuse_foreign_packages
from tuneloop.shared import VERSION
from tuneloop.shared.errors import DatabaseAway, LedgerUnavailable, SettingsError, StartupError, TuneloopError
from tuneloop.shared.ledger.facts import find_ignored_feedback
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.ledger.storage.database import upgrade
from tuneloop.shared.operations.older_ledger import adopt
from tuneloop.shared.operations.restore import require_stopped
from tuneloop.shared.settings.database_url import without_password
from tuneloop.shared.settings.loader import read_settings
from tuneloop.shared.settings.settings import Settings, holds_secret
from tuneloop.shared.settings.sources import OVERRIDES_VARIABLE

app = typer.Typer(
    name="tuneloop",
    help="Serve a model over OpenAI's API, and train it on the feedback.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
db_app = typer.Typer(help="The database that holds the experiences.", no_args_is_help=True)
config_app = typer.Typer(help="The settings.", no_args_is_help=True)
app.add_typer(db_app, name="db")
app.add_typer(config_app, name="config")
export_commands.add_to(app)
app.add_typer(rewards.app, name="rewards")
app.add_typer(alarms.app, name="alarms")
app.add_typer(raters.app, name="raters")
app.add_typer(keys.app, name="keys")
app.add_typer(versions.app, name="versions")
app.add_typer(refused_records.app, name="spool")
add_retention(app)
backup_commands.add_to(app)
app.command()(doctor.doctor)


def main() -> None:
    """Run the command line; an error is one sentence on stderr, never a traceback."""
    try:
        os.umask(0o077)  # what commands write is what people said
        refuse_foreign_packages()
        app()
    except TuneloopError as error:
        echo(str(error), err=True)
        sys.exit(error.exit_code if isinstance(error, StartupError) else 1)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"tuneloop {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Serve a model over OpenAI's API, and train it on the feedback."""


@app.command()
def run(
    config: ConfigOption,
    set_: SetOption = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let everybody in without a key: laboratories.")] = False,
) -> None:
    """Start what `mode` says: the explorer (serve), the trainer (train), or both side by side."""
    overrides = [*(set_ or ()), *(["explorer.insecure=true"] if insecure else [])]
    settings = read_settings(config, overrides).valid_settings()
    if any(holds_secret(override.partition("=")[0].strip()) for override in overrides):
        _run_without_flags(config, overrides)
    match settings.mode:
        case "serve":
            _replace_process(service("explorer", config, overrides))
        case "train":
            _replace_process(service("trainer", config, overrides))
        case "both":
            raise typer.Exit(supervise({name: service(name, config, overrides) for name in ("explorer", "trainer")}))
        case never:
            assert_never(never)


def service(name: str, config: Path, overrides: Sequence[str]) -> list[str]:
    """The command that starts a service. `-P`: a folder of its name where we are started must not be imported."""
    flags = [part for override in overrides for part in ("--set", override)]
    return [sys.executable, "-P", "-m", f"tuneloop.{name}", "--config", str(config), *flags]


def _run_without_flags(config: Path, overrides: Sequence[str]) -> NoReturn:
    """Start over with the overrides in the environment: every user of the machine can read a command line."""
    os.environ[OVERRIDES_VARIABLE] = json.dumps(overrides)
    _replace_process(
        [sys.executable, "-P", "-c", "from tuneloop.cli.main import main; main()", "run", "--config", str(config)]
    )


def _replace_process(command: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(command[0], command)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    help="Run a workflow once, and see its reward and its calls: FILE:FUNCTION --task JSON. More: --help.",
)
def debug(context: typer.Context) -> None:
    """Replace this process by the runner's command of this name."""
    _replace_process([sys.executable, "-P", "-m", "tuneloop.runner", "debug", *context.args])


@app.command()
def validate(config: Annotated[Path, typer.Argument(metavar="X.yaml")], set_: SetOption = None) -> None:
    """Say what a settings file means, or everything that is wrong with it (exit code 2)."""
    report = read_settings(config, set_ or ())
    settings = report.valid_settings()
    check_exposure(settings)
    lines = summary_of(settings)
    lines += [("not needed", ", ".join(report.not_needed)), ("Trinity's, unused", ", ".join(report.trinity_only))]
    echo(f"{config} is valid.")
    for name, value in lines:
        if value:
            echo(f"  {name:<18} {value}")


def check_exposure(settings: Settings) -> None:
    """Raise SettingsError where strangers could come in; a database that is away may have keys."""
    if settings.mode == "train" or settings.explorer.why_exposed(has_keys=False) is None:
        return
    schema = settings.buffer.trainer_input.experience_buffer.name
    try:
        there = revisions.current(settings.database_url, schema=schema) == revisions.newest()
        has_keys = there and _has_keys(settings)
    except (DatabaseAway, LedgerUnavailable):
        return
    if (problem := settings.explorer.why_exposed(has_keys=has_keys)) is not None:
        raise SettingsError(problem)


def _has_keys(settings: Settings) -> bool:
    with closing(Ledger.of(settings)) as ledger:
        return bool(ledger.keys.table().keys)


def summary_of(settings: Settings) -> list[tuple[str, str]]:
    """What the settings mean, for people: name and value."""
    length = settings.model.max_model_len
    lines = [
        ("mode", settings.mode),
        ("job folder", str(settings.job_dir)),
        ("database", without_password(settings.database_url)),
        ("model", f"{settings.model.model_path}, {f'{length} tokens' if length else 'full length'}"),
    ]
    if settings.mode != "train":
        lines += _summary_of_explorer(settings)
    if settings.mode != "serve":
        lines += _summary_of_trainer(settings)
    notes = [find_ignored_feedback(settings), settings.algorithm.unbounded if settings.mode != "serve" else None]
    return [*lines, *(("note", note) for note in notes if note)]


def _summary_of_explorer(settings: Settings) -> list[tuple[str, str]]:
    explorer, rollout, cluster = settings.explorer, settings.explorer.rollout_model, settings.cluster
    engines = f"{rollout.engine_num} x {rollout.tensor_parallel_size} GPU of {cluster.gpu_per_node}"
    if cluster.gpu_per_node == 0:
        engines = f"{rollout.engine_num}, on the CPU"
    if rollout.engine_urls:
        engines = f"running already: {', '.join(rollout.engine_urls)}"
    return [
        ("served as", settings.served_model_name),
        ("listens on", f"{explorer.listen_address}:{explorer.proxy_port}"),
        ("engines", engines),
        ("new versions", f"looked for every {explorer.service_status_check_interval:g} s"),
    ]


def _summary_of_trainer(settings: Settings) -> list[tuple[str, str]]:
    keeps = settings.trainer.max_checkpoints_to_keep or "all"
    return [
        ("step", f"{settings.buffer.train_batch_size} experiences, {settings.algorithm.algorithm_type}"),
        ("publishes", f"a version every {settings.trainer.save_interval} step(s), keeps {keeps}"),
    ]


@db_app.command("upgrade")
def db_upgrade(config: ConfigOption, set_: SetOption = None) -> None:
    """Bring the database to the newest schema; one that has it is left alone."""
    settings = read_settings(config, set_ or ()).valid_settings()
    open_to_group(settings)
    upgrade(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
    db_current(config, set_)


@db_app.command("current")
def db_current(config: ConfigOption, set_: SetOption = None) -> None:
    """Say which schema the database has, and which is the newest."""
    settings = read_settings(config, set_ or ()).valid_settings()
    schema = settings.buffer.trainer_input.experience_buffer.name
    there = revisions.current(settings.database_url, schema=schema)
    echo(f"{there or 'empty'} (newest: {revisions.newest()})")


@db_app.command("adopt")
def db_adopt(config: ConfigOption, set_: SetOption = None) -> None:
    """Go on with a database that was put back without its checkpoints and spool. No service may run."""
    settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        require_stopped(settings, now=time.time())
        done = adopt(settings, ledger)
    echo(f"{done.offered} records of the spool were offered to the database again, {done.refused} were refused")
    echo(f"the next version is {done.next_version}")


@config_app.command("show")
def config_show(config: ConfigOption, set_: SetOption = None) -> None:
    """Print every option as it will be used, as YAML. Secrets are hidden."""
    values = read_settings(config, set_ or ()).valid_settings().model_dump(mode="json")
    typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the settings file, for editors."""
    echo(json.dumps(Settings.model_json_schema(), indent=2))
