"""This file is `tuneloop jobs`."""

from collections.abc import Callable
from typing import Annotated

import msgspec
import typer

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json, existing_ledger, operator_name
from tuneloop.shared.errors import JobRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.operations.job_requests import JobRow, list_jobs, report_job

app = typer.Typer(help="The fine-tuning jobs: policies that learn from a file.", no_args_is_help=True, cls=CommandGroup)

_Id = Annotated[str, typer.Argument(metavar="JOB", help="Its id.")]


@app.command("list")
def list_(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """List the newest fifty, a line each."""
    with existing_ledger(config, set_) as (_settings, ledger):
        rows = list_jobs(ledger)
    if for_programs:
        echo(msgspec.json.encode(rows).decode())
        return
    echo(f"{'job':<31} {'tenant':<12} {'method':<13} {'state':<16} {'step':>11} {'loss':>8}  model")
    for row in rows:
        loss, step = "-" if row.loss is None else f"{row.loss:.4f}", f"{row.step}/{row.total_steps}"
        echo(f"{row.id:<31} {row.tenant:<12} {row.method:<13} {row.state:<16} {step:>11} {loss:>8}  {row.model}")


@app.command()
def show(job: _Id, config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Show a job, and what happened to it."""
    with existing_ledger(config, set_) as (_settings, ledger):
        row, events = report_job(ledger, ledger.jobs.get(job)), ledger.jobs.events(job)[::-1]
    if for_programs:
        echo_json(msgspec.to_builtins(row) | {"events": msgspec.to_builtins(events)})
        return
    echo("\n".join(f"{key:<16} {value}" for key, value in msgspec.to_builtins(row).items()))
    echo("\n".join(f"{each.level:<5} {each.message}" for each in events))


def _changes(state: JobState, done: str, *, only: JobState | None = None) -> Callable[..., None]:
    def change(job: _Id, config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
        with existing_ledger(config, set_) as (_settings, ledger):
            if only is not None and (found := ledger.jobs.get(job).state) is not only:
                raise JobRefused(f"the job is {found}, not {only}")
            row: JobRow = report_job(ledger, ledger.jobs.change(job, state, f"The job was {done} by {operator_name()}"))
        echo_json(msgspec.to_builtins(row)) if for_programs else echo(f"{job} is {row.state}")

    return change


app.command("cancel", help="End a job; what it has made stays.")(_changes(JobState.CANCELLED, "cancelled"))
app.command("pause", help="Train it no more for now.")(_changes(JobState.PAUSED, "paused"))
app.command("resume", help="Train a paused job again.")(_changes(JobState.QUEUED, "resumed", only=JobState.PAUSED))
