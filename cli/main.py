"""This file is the command `tuneloop`."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn, assert_never

import typer

from tuneloop.cli import exports, imports, keys, operations, outbox, policies, rewards, settings, versions
from tuneloop.cli.both import service, supervise
from tuneloop.cli.capacity_plan import plan
from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.erasure import erase_, purge
from tuneloop.cli.evaluate import evaluate
from tuneloop.cli.finetune import finetune
from tuneloop.cli.init import init
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, existing_ledger, open_to_group, tell
from tuneloop.cli.settings import LogJsonOption, LogLevelOption, hand_on_log_options, sentence_of_tune
from tuneloop.shared import VERSION
from tuneloop.shared.errors import SettingsError, StartupError, TuneloopError
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.ledger.storage.database import upgrade
from tuneloop.shared.operations.backup import require_stopped
from tuneloop.shared.operations.older_ledger import adopt
from tuneloop.shared.settings.base_model import require_trainable
from tuneloop.shared.settings.loader import OVERRIDES_VARIABLE, read_settings
from tuneloop.shared.settings.settings import holds_secret

app = typer.Typer(
    name="tuneloop",
    help="Serve a model over OpenAI's API, and train it on the feedback.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=CommandGroup,
)
db_app = typer.Typer(help="The database that holds the experiences.", no_args_is_help=True, cls=CommandGroup)
app.add_typer(db_app, name="db")
app.add_typer(settings.config_app, name="config")
app.command()(init)
app.command()(plan)
app.command()(settings.validate)
app.command()(settings.schema)
app.command("export")(exports.export_)
app.command("import")(imports.import_)
app.command()(finetune)
app.add_typer(rewards.app, name="rewards")
app.add_typer(operations.alarms_app, name="alarms")
app.add_typer(rewards.raters_app, name="raters")
app.add_typer(keys.app, name="keys")
app.add_typer(versions.app, name="versions")
app.add_typer(policies.app, name="policies")
app.add_typer(policies.jobs_app, name="jobs")
app.add_typer(outbox.app, name="outbox")
app.command()(evaluate)
app.command("purge")(purge)
app.command("erase")(erase_)
app.command()(operations.backup)
app.command()(operations.restore)
app.command()(operations.doctor)
app.command()(operations.explain)


def main() -> None:
    """Run the command line; an error is one sentence on stderr, never a traceback."""
    try:
        os.umask(0o077)  # what commands write is what people said
        app(prog_name="tuneloop")
    except TuneloopError as error:
        echo(str(error), err=True)
        sys.exit(error.exit_code if isinstance(error, StartupError) else 1)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", is_eager=True)] = False) -> None:
    """Serve a model over OpenAI's API, and train it on the feedback."""
    if version:
        echo(f"tuneloop {VERSION}")
        raise typer.Exit


InsecureOption = Annotated[bool, typer.Option("--insecure", help="Let everybody in without a key: laboratories.")]


@app.command()
def run(
    config: ConfigOption,
    set_: SetOption = None,
    insecure: InsecureOption = False,
    log_level: LogLevelOption = None,
    log_json: LogJsonOption = False,
) -> None:
    """Start what `mode` says: the explorer (serve), the trainer (train), or both side by side."""
    hand_on_log_options(log_level, log_json=log_json)
    _start(config, [*(set_ or ()), *_exposure(insecure)])


@app.command()
def serve(
    config: ConfigOption,
    set_: SetOption = None,
    insecure: InsecureOption = False,
    log_level: LogLevelOption = None,
    log_json: LogJsonOption = False,
) -> None:
    """Start the explorer, whatever `mode` says: it answers, records, and takes feedback and new versions."""
    hand_on_log_options(log_level, log_json=log_json)
    _start(config, [*(set_ or ()), *_exposure(insecure), "mode=serve"])


@app.command()
def train(
    config: ConfigOption, set_: SetOption = None, log_level: LogLevelOption = None, log_json: LogJsonOption = False
) -> None:
    """Start the trainer, whatever `mode` says: it makes versions of what was rewarded."""
    hand_on_log_options(log_level, log_json=log_json)
    _start(config, [*(set_ or ()), "mode=train"])


def _exposure(insecure: bool) -> list[str]:
    return ["explorer.insecure=true"] if insecure else []


def _start(config: Path, overrides: Sequence[str]) -> None:
    report = read_settings(config, overrides)
    settings = report.valid_settings()
    if report.is_of_tune:
        raise SettingsError(sentence_of_tune(config))
    require_trainable(settings)
    if any(holds_secret(override.partition("=")[0].strip()) for override in overrides):
        os.environ[OVERRIDES_VARIABLE] = json.dumps(overrides)
        _replace_process(
            [sys.executable, "-P", "-c", "from tuneloop.cli.main import main; main()", "run", "--config", str(config)]
        )
    match settings.mode:
        case "serve":
            _replace_process(service("explorer", config, overrides))
        case "train":
            _replace_process(service("trainer", config, overrides))
        case "both":
            raise typer.Exit(supervise({name: service(name, config, overrides) for name in ("explorer", "trainer")}))
        case never:
            assert_never(never)


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


@app.command(
    "tune",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    help="Run the tasks that FILE names, and train on their rewards: FILE --workflow module:function. More: --help.",
)
def tune_(context: typer.Context) -> None:
    """Replace this process by the runner's command of this name."""
    _replace_process([sys.executable, "-P", "-m", "tuneloop.runner", "tune", *context.args])


@db_app.command("upgrade")
def db_upgrade(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Bring the database to the newest schema; one that has it is left alone."""
    settings = read_settings(config, set_ or ()).valid_settings()
    open_to_group(settings)
    upgrade(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
    db_current(config, set_, for_programs)


@db_app.command("current")
def db_current(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Say which schema the database has, and which is the newest."""
    settings = read_settings(config, set_ or ()).valid_settings()
    schema = settings.buffer.trainer_input.experience_buffer.name
    there, newest = revisions.current(settings.database_url, schema=schema), revisions.newest()
    told = f"{there or 'empty'} (newest: {newest})"
    tell({"schema": there, "newest": newest}, told, for_programs=for_programs)


@db_app.command("adopt")
def db_adopt(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Go on with a database that was put back without its checkpoints. No service may run."""
    with existing_ledger(config, set_) as (settings, ledger):
        require_stopped(settings)
        following = adopt(settings.job_dir, ledger)
    tell({"next_version": following}, f"the next version is {following}", for_programs=for_programs)
