"""This file is `tuneloop policies`."""

from collections.abc import Callable
from typing import Annotated

import msgspec
import typer
import yaml

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import (
    ConfigOption,
    JsonOption,
    SetOption,
    echo,
    echo_json,
    existing_ledger,
    operator_name,
)
from tuneloop.shared.errors import PolicyRefused
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Policy
from tuneloop.shared.operations.diagnosis import ago
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
    if for_programs:
        echo_json(msgspec.to_builtins(made))
    else:
        echo(f"{made.name} begins as version {begun}, with the weights of version {made.parent}")


@app.command("list")
def list_(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """List the policies, a line each."""
    with existing_ledger(config, set_) as (_settings, ledger):
        rows, now = list_policies(ledger), ledger.transactions.time()
    if for_programs:
        echo(msgspec.json.encode(rows).decode())
        return
    echo(f"{'policy':<28} {'state':<8} {'served':>7} {'newest':>7} {'reward':>22} {'waiting':>8}  last step")
    echo("\n".join(_line(row, now) for row in rows))


@app.command()
def show(name: _Name, config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Show everything about a policy."""
    with existing_ledger(config, set_) as (_settings, ledger):
        [row] = report_policies(ledger, [_find(ledger, name)])
    if for_programs:
        echo_json(msgspec.to_builtins(row))
    else:
        echo("\n".join(f"{key:<14} {value}" for key, value in msgspec.to_builtins(row).items()))


@app.command()
def pause(name: _Name, config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Train it no more for now; it answers all the while."""
    _change(
        config,
        set_,
        name,
        lambda ledger, policy: ledger.policies.pause(policy.id),
        "is not trained any more",
        as_json=for_programs,
    )


@app.command()
def resume(name: _Name, config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Train a paused policy again."""
    _change(
        config,
        set_,
        name,
        lambda ledger, policy: ledger.policies.pause(policy.id, paused=False),
        "is trained",
        as_json=for_programs,
    )


@app.command()
def delete(name: _Name, config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Let it answer nobody, for good; its rows and versions stay in the ledger."""

    def end(ledger: Ledger, policy: Policy) -> None:
        ledger.policies.delete(policy.id, by=operator_name())

    _change(config, set_, name, end, "is deleted", as_json=for_programs)


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
    if for_programs:
        echo_json({"version": number, "policy": target.name})
        return
    echo(f"version {number} of {target.name} has the weights of the champion of {source.name}")


def _find(ledger: Ledger, name: str) -> Policy:
    tenant, slash, own_name = name.rpartition("/")
    return ledger.policies.find(own_name, tenant if slash else None)


def _change(
    config: ConfigOption,
    set_: SetOption,
    name: str,
    change: Callable[[Ledger, Policy], None],
    done: str,
    *,
    as_json: bool,
) -> None:
    with existing_ledger(config, set_) as (_settings, ledger):
        change(ledger, policy := _find(ledger, name))
    if as_json:
        echo_json({"name": policy.name, "done": done})
    else:
        echo(f"{policy.name} {done}")


def _line(row: PolicyRow, now: float) -> str:
    name = f"{row.tenant}/{row.name}" if row.tenant else row.name
    reward = "-" if row.reward is None else f"{row.reward:.3f}"
    if row.interval is not None:
        reward += f" ({row.interval[0]:.2f} to {row.interval[1]:.2f})"
    step = "-" if row.last_step_at is None else ago(now, row.last_step_at)
    return f"{name:<28} {row.state:<8} {row.served:>7} {row.newest:>7} {reward:>22} {row.waiting:>8}  {step}"
