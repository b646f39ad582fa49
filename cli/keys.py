"""This file is `tuneloop keys`."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import (
    ConfigOption,
    JsonOption,
    SetOption,
    echo,
    echo_json,
    existing_ledger,
    open_to_group,
    operator_name,
    seconds,
    tell,
)
from tuneloop.shared.errors import KeyRefused, TuneloopError
from tuneloop.shared.experience import DEFAULT_TENANT, Scope
from tuneloop.shared.ledger.keys import AccessKey, KeyGrant, KeyLimits
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.ledger.storage.database import upgrade
from tuneloop.shared.logging import visible
from tuneloop.shared.operations.diagnosis import moment
from tuneloop.shared.settings.loader import read_settings

app = typer.Typer(help="The keys that clients are let in by.", no_args_is_help=True, cls=CommandGroup)

_Name = Annotated[
    str, typer.Option("--name", metavar="[TENANT/]NAME", help="Whose key it is: its feedback is in this name.")
]
_Scopes = Annotated[
    list[Scope] | None, typer.Option("--scope", help="What it allows, once for each; default: inference, feedback.")
]
_Expires = Annotated[
    float | None, typer.Option("--expires-in", parser=seconds, metavar="30d", help="For how long; else for ever.")
]
_Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=N",
        help=f"How much it allows, once for each of {', '.join(KeyLimits.__struct_fields__)}.",
    ),
]
_Last = Annotated[int, typer.Option("--last", min=1, max=100_000, help="How many.")]


@app.command()
def create(
    config: ConfigOption,
    name: _Name,
    scope: _Scopes = None,
    limit: _Limits = None,
    expires_in: _Expires = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="Who answers requests that name none.")] = None,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Make a key, and print it, once. A database that is not there yet is made."""
    tenant, slash, own_name = name.rpartition("/")
    limits: dict[str, int] = {}
    for text in limit or ():
        limited, _, value = text.partition("=")
        if limited not in KeyLimits.__struct_fields__ or not (value.isascii() and value.isdigit()):
            raise KeyRefused(
                f"--limit {text}: write NAME=N, a whole number, with one of {', '.join(KeyLimits.__struct_fields__)}"
            )
        limits[limited] = int(value)
    grant = KeyGrant(
        name=own_name,
        scopes=tuple(scope or (Scope.INFERENCE, Scope.FEEDBACK)),
        tenant=tenant if slash else DEFAULT_TENANT,
        limits=KeyLimits(**limits),
        expires_in=expires_in,
    )
    settings = read_settings(config, set_ or ()).valid_settings()
    schema = settings.buffer.trainer_input.experience_buffer.name
    if revisions.current(settings.database_url, schema=schema) is None:
        open_to_group(settings)
        upgrade(settings.database_url, schema=schema)
    with existing_ledger(config, set_) as (_settings, ledger):
        if policy is not None:
            grant = msgspec.structs.replace(grant, policy=ledger.policies.find(policy, grant.tenant).id)
        key, secret = ledger.keys.create(grant, actor=operator_name())
    if for_programs:
        echo_json(key_report(key) | {"key": secret})
        return
    echo(f"{key.key_id}: {key.name}, tenant {key.tenant}, {', '.join(key.scopes)}. It is not shown again:", err=True)
    echo(secret)


@app.command("list")
def list_(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """List the keys, without their secrets, the oldest first."""
    with existing_ledger(config, set_) as (_settings, ledger):
        found, now = ledger.keys.all(), ledger.transactions.time()
    lines = [line for key in found for line in _lines(key, now)]
    tell([key_report(key) for key in found], *lines or ["there are no keys"], for_programs=for_programs)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="Its id, as `list` shows it.")],
    config: ConfigOption,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """End a key: a service refuses it a second later."""
    with existing_ledger(config, set_) as (_settings, ledger):
        if not ledger.keys.revoke(key_id, actor=operator_name()):
            raise TuneloopError(f"no key {key_id} is in force; `tuneloop keys list` shows all")
    tell({"key_id": key_id, "revoked": True}, f"{key_id} is revoked", for_programs=for_programs)


@app.command()
def audit(config: ConfigOption, set_: SetOption = None, last: _Last = 50, for_programs: JsonOption = False) -> None:
    """Say who made and revoked which key, the newest first."""
    with existing_ledger(config, set_) as (_settings, ledger):
        events = ledger.keys.events(last=last)
    lines = [
        f"{moment(each.at)}  {each.key_id}  {each.action} by {visible(each.actor)}  ({each.name}, tenant {each.tenant})"
        for each in events
    ]
    tell([each._asdict() for each in events], *lines or ["no key was made yet"], for_programs=for_programs)


def key_report(key: AccessKey) -> dict[str, object]:
    report: dict[str, object] = msgspec.to_builtins(key)
    del report["digest"]
    return report


def _lines(key: AccessKey, now: float) -> Iterator[str]:
    state = "in force"
    if key.revoked_at is not None:
        state = f"revoked {moment(key.revoked_at)}"
    elif key.expires_at is not None:
        state = f"{'expired' if key.expires_at <= now else 'until'} {moment(key.expires_at)}"
    allows = f"{key.name}, tenant {key.tenant}: {', '.join(key.scopes)}"
    yield f"{key.key_id}  {allows}; made {moment(key.created_at)}, {state}"
    limits = {name: limit for name, limit in msgspec.structs.asdict(key.limits).items() if limit is not None}
    if limits:
        yield f"    {', '.join(f'{name} {limit}' for name, limit in limits.items())}"
