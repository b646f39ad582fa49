"""This file is `tuneloop evaluate`."""

import os
from pathlib import Path
from typing import Annotated

import httpx
import typer

from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, counting, echo, echo_json, existing_ledger
from tuneloop.shared.errors import EnvironmentRefused, PolicyRefused, VersionRefused
from tuneloop.shared.evaluation.tasks import judge_of, tasks_of
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import DEFAULT
from tuneloop.shared.operations.engines import explorer_url
from tuneloop.shared.operations.task_comparison import AskedVersion, compare_answers, lines_of, page_of
from tuneloop.shared.settings.settings import Settings


def evaluate(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS.jsonl", help="Tasks with known answers, one a line.")],
    config: ConfigOption,
    versions: Annotated[
        str, typer.Option(help="What is compared with the first: base, champion, numbers, names of policies.")
    ] = "base,champion",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the answers there, side by side.")] = None,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="End with 1 if a version is worse than the first, beyond chance.")
    ] = False,
    service: Annotated[
        str | None, typer.Option(metavar="URL", help="The service; its key is read from TUNELOOP_API_KEY.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 256,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Ask versions of the running service the same tasks, and compare their scores task by task."""
    with existing_ledger(config, set_) as (settings, ledger):
        asked = [_find_version(settings, ledger, name.strip()) for name in versions.split(",") if name.strip()]
    if not asked:
        raise VersionRefused("--versions names none; write --versions base,champion")
    options = settings.monitor.evaluation.model_copy(update={"path": tasks})
    questions, judge = tasks_of(options, named=""), judge_of(options)
    if judge is None:
        raise EnvironmentRefused(
            "monitor.evaluation.judge: model is asked by the services alone; --set monitor.evaluation.judge=contains"
        )
    key = os.environ.get("TUNELOOP_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = (service or explorer_url(settings)).rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=url, headers=headers, timeout=300.0) as client, counting("tasks") as progress:
        found = compare_answers(client, questions, asked, judge, most_tokens=max_tokens, progress=progress)
    if html is not None:
        try:
            html.write_text(page_of(found, f"{tasks.name}: {', '.join(each.name for each in asked)}"))
        except OSError as error:
            raise EnvironmentRefused(f"{html} cannot be written: {error.strerror}") from None
    if for_programs:
        echo_json(found.as_json())
    else:
        echo("\n".join(lines_of(found)))
    is_worse = fail_if_worse and any(each.is_worse for each in found.scores if not each.slice)
    if is_worse or not found.complete or not any(each.score.replies for each in found.scores):
        raise typer.Exit(1)


def _find_version(settings: Settings, ledger: Ledger, name: str) -> AskedVersion:
    own = {
        policy.id: policy.name if policy.id != DEFAULT else settings.served_model_name
        for policy in ledger.policies.all()
    }
    champions = {ledger.versions.of(policy).champion().version: model for policy, model in own.items()}
    if name == "base" or (name.isascii() and name.isdigit()):
        number = 0 if name == "base" else int(name)
        if number not in {each.version for each in ledger.versions.all()}:
            raise VersionRefused(f"there is no version {number}; `tuneloop versions list` names them")
    elif name == "champion":
        number = ledger.versions.champion().version
    else:
        try:
            number = ledger.versions.of(ledger.policies.find(name).id).champion().version
        except PolicyRefused as error:
            raise VersionRefused(f"--versions {name}: neither base, champion nor a number, and {error}") from None
    if number in champions:
        return AskedVersion(name, number, champions[number])
    cure = f"`tuneloop versions pin {number}` has it served, and `tuneloop versions unpin` ends that"
    if settings.model.lora.rank:
        cure = f"`tuneloop policies create NAME --parent {number}` has it served beside others: --versions NAME"
    elif not settings.explorer.version_pins:
        cure = "explorer.version_pins: true lets clients ask for a version; " + cure
    return AskedVersion(name, number, f"{settings.served_model_name}@{number}", cure)
