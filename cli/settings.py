"""This file is the commands that read a settings file and start nothing."""

import os
import re
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json
from tuneloop.shared.errors import DatabaseAway, LedgerUnavailable, SettingsError
from tuneloop.shared.ledger.facts import find_ignored_feedback
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.logging import JSON_VARIABLE, LEVEL_VARIABLE, LogLevel
from tuneloop.shared.operations.engines import plugin_sentence
from tuneloop.shared.settings.base_model import missing_downloads, require_trainable, routing_note
from tuneloop.shared.settings.database_url import without_password
from tuneloop.shared.settings.hardware import count_gpus, idle_sentence, missing_gpus, placement_sentence
from tuneloop.shared.settings.loader import read_settings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import GateSettings

_OF_THE_PAGE = (
    (r"\s*\(\[more\]\([^)\s]*\)\)", ""),
    (r"\s*\[Why\]\([^)\s]*\)\.", ""),
    (r"\[([^\]]+)\]\([^)\s]*\)", r"\1"),
    ("_Serve\\._", "Read by the explorer."),
    ("_Train\\._", "Read by the trainer."),
)

#: As examples write what a reader has to fill in: Trinity's, and those of most pages.
_PLACEHOLDER = re.compile(r"/path/to/|(^|/)your[-_][^/]*$|<[^/]*>|/[A-Z_]+_(DIR|PATH)$")

config_app = typer.Typer(help="The settings.", no_args_is_help=True, cls=CommandGroup)


def validate(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Say what a settings file means, or everything that is wrong with it (exit code 2)."""
    report = read_settings(config, set_ or ())
    if for_programs:
        problems, understood = list(report.problems), dict[str, object]()
        if report.settings is not None:
            try:
                refuse_placeholders(report.settings)
                check_exposure(report.settings)
                require_trainable(report.settings)
                understood = {name.replace(" ", "_"): value for name, value in summary_of(report.settings)}
                understood |= {"run_by": sentence_of_tune(config)} if report.is_of_tune else {}
                understood |= {"notes": notes_on(report.settings), "ignored": report.ignored}
            except SettingsError as error:
                problems = str(error).splitlines()
        echo_json({"file": str(config), "valid": bool(understood), "problems": problems, **understood})
        if not understood:
            raise typer.Exit(SettingsError.exit_code)
        return
    settings = report.valid_settings()
    refuse_placeholders(settings)
    check_exposure(settings)
    require_trainable(settings)
    lines = [*summary_of(settings), *(("note", note) for note in notes_on(settings))]
    if report.names_tasks and settings.mode == "serve":
        lines.append(("note", "buffer.explorer_input: mode serve runs no tasks; it answers clients"))
    lines.append(("ignored", ", ".join(report.ignored)))
    echo(sentence_of_tune(config) if report.is_of_tune else f"{config} is valid.")
    for name, value in lines:
        if value:
            echo(f"  {name:<18} {value}")


def sentence_of_tune(config: Path) -> str:
    return f"{config} names tasks, and with `tuneloop run` nothing will ask for replies: tuneloop tune {config}"


def notes_on(settings: Settings) -> list[str]:
    unbounded = settings.algorithm.unbounded if settings.mode != "serve" else None
    attached = settings.mode != "train" and settings.explorer.rollout_model.engine_urls
    plugin = attached and f"{plugin_sentence(of_others=True)}. `tuneloop doctor` says which engines have the plugin"
    gpus = missing_gpus(settings, gpus_here=count_gpus())
    notes = [gpus, find_ignored_feedback(settings), unbounded, routing_note(settings), idle_sentence(settings), plugin]
    return [*missing_downloads(settings), *(note for note in notes if note)]


def summary_of(settings: Settings) -> list[tuple[str, str]]:
    length = settings.model.max_model_len
    lines = [
        ("mode", settings.mode),
        ("job folder", str(settings.job_dir)),
        ("database", without_password(settings.database_url)),
        ("model", f"{settings.model.model_path}, {f'{length} tokens' if length else 'full length'}"),
    ]
    if settings.mode != "train":
        explorer, rollout, cluster = settings.explorer, settings.explorer.rollout_model, settings.cluster
        engines = f"{rollout.engine_num} x {rollout.tensor_parallel_size} GPU of {cluster.gpu_per_node}"
        if cluster.gpu_per_node == 0:
            engines = f"{rollout.engine_num}, on the CPU"
        if rollout.engine_urls:
            engines = f"running already: {', '.join(rollout.engine_urls)}"
        lines += [
            ("served as", settings.served_model_name),
            ("listens on", f"{explorer.listen_address}:{explorer.proxy_port}"),
            ("engines", engines),
            ("new versions", f"looked for every {explorer.service_status_check_interval:g} s"),
        ]
    if settings.mode != "serve":
        keeps = str(settings.trainer.max_checkpoints_to_keep or "all")
        keeps += f" and each of a {settings.trainer.keep_interval}th step" if settings.trainer.keep_interval else ""
        if settings.trainer_workers > 1:
            lines.append(("workers", str(settings.trainer_workers)))
        lines += [
            ("step", f"{settings.buffer.train_batch_size} experiences, {settings.algorithm.algorithm_type}"),
            ("publishes", f"a version every {settings.trainer.save_interval} step(s), keeps {keeps}"),
        ]
    if placement := placement_sentence(settings):
        lines.append(("GPUs", placement))
    return lines


@config_app.command()
def show(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Print every option as it will be used, as YAML. Secrets are hidden."""
    values = read_settings(config, set_ or ()).valid_settings().model_dump(mode="json")
    if for_programs:
        echo_json(values)
        return
    typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)


@config_app.command()
def schema() -> None:
    """Print the JSON schema of the settings file, for editors."""
    schema = _for_editors(Settings.model_json_schema())
    word = {"enum": [*get_args(GateSettings.model_fields["mode"].annotation), False]}  # an `off` is false in YAML
    schema["properties"]["gate"] = {"anyOf": [schema["properties"]["gate"], word]}
    echo_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


def _for_editors(node: Any) -> Any:
    """The schema, its descriptions without what only docs/settings.md has: links, and marks for a service."""
    if isinstance(node, list):
        return [_for_editors(each) for each in node]
    if not isinstance(node, dict):
        return node
    described = {name: _for_editors(value) for name, value in node.items()}
    if isinstance(text := described.get("description"), str):
        for of_page, of_editors in _OF_THE_PAGE:
            text = re.sub(of_page, of_editors, text)
        described["description"] = " ".join(text.split())
    return described


def refuse_placeholders(settings: Settings) -> None:
    """Raise SettingsError for a folder that an example names for one of the reader's own, unless it is there."""
    folders = {"model.model_path": settings.model.model_path, "checkpoint_root_dir": settings.checkpoint_root_dir}
    wrong = [
        f"{name}: {folder} stands in an example for a folder of yours; write its path"
        for name, folder in folders.items()
        if _PLACEHOLDER.search(str(folder)) and not folder.exists()
    ]
    if wrong:
        raise SettingsError("\n".join(wrong))


def check_exposure(settings: Settings) -> None:
    """Raise SettingsError where strangers could come in; a database that is away may have keys."""
    if settings.mode == "train" or settings.explorer.why_exposed(has_keys=False) is None:
        return
    schema = settings.buffer.trainer_input.experience_buffer.name
    try:
        has_keys = False
        if revisions.current(settings.database_url, schema=schema) == revisions.newest():
            with closing(Ledger.of(settings)) as ledger:
                has_keys = bool(ledger.keys.table().keys)
    except (DatabaseAway, LedgerUnavailable):
        return
    if (problem := settings.explorer.why_exposed(has_keys=has_keys)) is not None:
        raise SettingsError(problem)


LogLevelOption = Annotated[LogLevel | None, typer.Option("--log-level", help="The least level that is logged.")]
LogJsonOption = Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")]


def hand_on_log_options(level: LogLevel | None, *, log_json: bool) -> None:
    """Have the processes that are started from here log so; without an option, as the environment says."""
    if level is not None:
        os.environ[LEVEL_VARIABLE] = level.value
    if log_json:
        os.environ[JSON_VARIABLE] = "1"
