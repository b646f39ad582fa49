"""This file is `tuneloop policies` and `tuneloop jobs`."""

from collections.abc import Callable
from typing import Annotated

import msgspec
import typer
import yaml

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, existing_ledger, operator_name, tell
from tuneloop.shared.errors import JobRefused, PolicyRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Policy
from tuneloop.shared.operations.diagnosis import ago
from tuneloop.shared.operations.job_requests import JobRow, list_jobs, report_job
from tuneloop.shared.operations.policy_report import (
    PolicyDraft,
    PolicyRow,
    create_policy,
    list_policies,
    report_policies,
)

app = typer.Typer(
    help="The policies: adapters that are trained apart, each with its own versions.",
    no_args_is_help=True,
    cls=CommandGroup,
)

_Name = Annotated[str, typer.Argument(metavar="[TENANT/]NAME", help="Its name.")]
_Parent = Annotated[
    str, typer.Option("--parent", metavar="N|NAME", help="The version that it begins with, or the policy.")
]
_Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="What it has otherwise, such as algorithm.algorithm_type=grpo."),
]


@app.command()
def create(
    name: _Name,
    config: ConfigOption,
    parent: _Parent = "0",
    option: _Options = None,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Make a policy: requests that name it as their model are answered by it."""
    tenant, _, own_name = name.rpartition("/")
    options = {}
    for text in option or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise PolicyRefused(f"--option {text}: write KEY=VALUE")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise PolicyRefused(f"--option {key}: not a value: {value}") from None
    number = parent.isascii() and parent.isdigit()
    draft = PolicyDraft(name=own_name, tenant=tenant, parent=int(parent) if number else parent, options=options)
    with existing_ledger(config, set_) as (settings, ledger):
        made = create_policy(settings, ledger, draft, by=operator_name())
        begun = ledger.versions.of(made.id).champion().version
    told = f"{made.name} begins as version {begun}, with the weights of version {made.parent}"
    tell(made, told, for_programs=for_programs)


@app.command("list")
def list_(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """List the policies, a line each."""
    with existing_ledger(config, set_) as (_settings, ledger):
        rows, now = list_policies(ledger), ledger.transactions.time()
    head = f"{'policy':<28} {'state':<8} {'served':>7} {'newest':>7} {'reward':>22} {'waiting':>8}  last step"
    tell(rows, head, *(_line(row, now) for row in rows), for_programs=for_programs)


@app.command()
def show(name: _Name, config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Show everything about a policy."""
    with existing_ledger(config, set_) as (_settings, ledger):
        [row] = report_policies(ledger, [_find(ledger, name)])
    lines = (f"{key:<14} {value}" for key, value in msgspec.to_builtins(row).items())
    tell(row, *lines, for_programs=for_programs)


def _changes(change: Callable[[Ledger, Policy], None], done: str) -> Callable[..., None]:
    def command(name: _Name, config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
        with existing_ledger(config, set_) as (_settings, ledger):
            change(ledger, policy := _find(ledger, name))
        tell({"name": policy.name, "done": done}, f"{policy.name} {done}", for_programs=for_programs)

    return command


app.command("pause", help="Train it no more for now; it answers all the while.")(
    _changes(lambda ledger, policy: ledger.policies.pause(policy.id), "is not trained any more")
)
app.command("resume", help="Train a paused policy again.")(
    _changes(lambda ledger, policy: ledger.policies.pause(policy.id, paused=False), "is trained")
)
app.command("delete", help="Stop serving it for good; its rows and versions stay in the ledger.")(
    _changes(lambda ledger, policy: ledger.policies.delete(policy.id, by=operator_name()), "is deleted")
)


@app.command()
def promote(
    name: _Name,
    config: ConfigOption,
    into: Annotated[str, typer.Option("--into", metavar="NAME", help="The policy that takes it.")] = "default",
    reason: Annotated[str, typer.Option("--reason", help="The reason, for the record.")] = "",
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Make its champion a candidate of another policy, which trains on from it."""
    with existing_ledger(config, set_) as (_settings, ledger):
        source, target = _find(ledger, name), _find(ledger, into)
        number = ledger.policies.promote(source.id, into=target.id, by=operator_name(), reason=reason.strip())
    told = f"version {number} of {target.name} has the weights of the champion of {source.name}"
    tell({"version": number, "policy": target.name}, told, for_programs=for_programs)


def _find(ledger: Ledger, name: str) -> Policy:
    tenant, slash, own_name = name.rpartition("/")
    return ledger.policies.find(own_name, tenant if slash else None)


def _line(row: PolicyRow, now: float) -> str:
    name = f"{row.tenant}/{row.name}" if row.tenant else row.name
    reward = "-" if row.reward is None else f"{row.reward:.3f}"
    if row.interval is not None:
        reward += f" ({row.interval[0]:.2f} to {row.interval[1]:.2f})"
    step = "-" if row.last_step_at is None else ago(now, row.last_step_at)
    return f"{name:<28} {row.state:<8} {row.served:>7} {row.newest:>7} {reward:>22} {row.waiting:>8}  {step}"


jobs_app = typer.Typer(
    help="The fine-tuning jobs: policies that learn from a file.", no_args_is_help=True, cls=CommandGroup
)

_Id = Annotated[str, typer.Argument(metavar="JOB", help="Its id.")]


@jobs_app.command("list")
def list_jobs_(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """List the newest fifty, a line each."""
    with existing_ledger(config, set_) as (_settings, ledger):
        rows = list_jobs(ledger)
    lines = [f"{'job':<31} {'tenant':<12} {'method':<13} {'state':<16} {'step':>11} {'loss':>8}  model"]
    for row in rows:
        loss, step = "-" if row.loss is None else f"{row.loss:.4f}", f"{row.step}/{row.total_steps}"
        told = f"{row.id:<31} {row.tenant:<12} {row.method:<13} {row.state:<16} {step:>11} {loss:>8}  {row.model}"
        lines.append(told)
    tell(rows, *lines, for_programs=for_programs)


@jobs_app.command("show")
def show_job(job: _Id, config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Show a job, and what happened to it."""
    with existing_ledger(config, set_) as (_settings, ledger):
        row, events = report_job(ledger, ledger.jobs.get(job)), ledger.jobs.events(job)[::-1]
    fields = msgspec.to_builtins(row)
    lines = [f"{key:<16} {value}" for key, value in fields.items()]
    lines += [f"{each.level:<5} {each.message}" for each in events]
    tell(fields | {"events": events}, *lines, for_programs=for_programs)


def _job_changes(state: JobState, done: str, *, only: JobState | None = None) -> Callable[..., None]:
    def change(job: _Id, config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
        with existing_ledger(config, set_) as (_settings, ledger):
            if only is not None and (found := ledger.jobs.get(job).state) is not only:
                raise JobRefused(f"the job is {found}, not {only}")
            row: JobRow = report_job(ledger, ledger.jobs.change(job, state, f"The job was {done} by {operator_name()}"))
        tell(row, f"{job} is {row.state}", for_programs=for_programs)

    return change


jobs_app.command("cancel", help="End a job; what it has made stays.")(_job_changes(JobState.CANCELLED, "cancelled"))
jobs_app.command("pause", help="Train it no more for now.")(_job_changes(JobState.PAUSED, "paused"))
jobs_app.command("resume", help="Train a paused job again.")(
    _job_changes(JobState.QUEUED, "resumed", only=JobState.PAUSED)
)
