"""`tuneloop keys`: made, told once, listed without their secrets, revoked, and what of it is on record."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.cli.operations.conftest import Run
from tuneloop.cli.main import app
from tuneloop.shared.errors import EnvironmentRefused, KeyRefused, SettingsError, TuneloopError
from tuneloop.shared.ledger.ledger import Ledger


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=True)


def keys(file: Path, command: str, *arguments: str) -> Result:
    return invoke("keys", command, "-c", str(file), *arguments)


def test_a_key_is_told_once_and_never_again(file: Path, tmp_path: Path) -> None:
    limits = ("--limit", "requests_per_minute=60", "--limit", "max_concurrent=4")
    made = keys(file, "create", "--name", "acme/web", "--scope", "read", *limits, "--expires-in", "30d")
    secret = made.stdout.strip()
    assert secret.startswith("tl-")
    assert len(secret) > 40
    [listed] = json.loads(keys(file, "list", "--json").stdout)
    assert (listed["name"], listed["tenant"], listed["scopes"]) == ("web", "acme", ["read"])
    assert listed["limits"] | {"requests_per_minute": 60, "max_concurrent": 4} == listed["limits"]
    assert listed["expires_at"] - listed["created_at"] == 30 * 86400
    shown = keys(file, "list").output + keys(file, "audit").output + keys(file, "audit", "--json").output
    assert "requests_per_minute 60, max_concurrent 4" in shown
    written = b"".join(each.read_bytes() for each in tmp_path.rglob("*") if each.is_file())
    assert secret not in shown
    assert secret.encode() not in written


def test_a_revoked_key_is_revoked_once_and_stays_on_record(file: Path) -> None:
    keys(file, "create", "--name", "web")
    [listed] = json.loads(keys(file, "list", "--json").stdout)
    assert keys(file, "revoke", listed["key_id"]).output == f"{listed['key_id']} is revoked\n"
    with pytest.raises(TuneloopError, match="is in force"):
        invoke_raising(file, "revoke", listed["key_id"])
    assert "revoked" in keys(file, "list").output
    events = json.loads(keys(file, "audit", "--json").stdout)
    assert [(each["action"], each["name"]) for each in events] == [("revoked", "web"), ("created", "web")]


def invoke_raising(file: Path, command: str, *arguments: str) -> None:
    CliRunner().invoke(app, ["keys", command, "-c", str(file), *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--name", "a b"], "name must have"),
        (["--name", "/web"], "tenant must have"),
        (["--name", "web", "--limit", "cats=1"], "--limit cats=1: write NAME=N"),
        (["--name", "web", "--limit", "max_concurrent=0"], "max_concurrent must lie between 1"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused(file: Path, arguments: list[str], sentence: str) -> None:
    with pytest.raises(KeyRefused, match=sentence):
        invoke_raising(file, "create", *arguments)


def test_a_service_for_strangers_needs_a_key(file: Path) -> None:
    elsewhere = ("--set", "explorer.listen_address=0.0.0.0")
    with pytest.raises(SettingsError, match="tuneloop keys create"):
        CliRunner().invoke(app, ["validate", str(file), *elsewhere], catch_exceptions=False)
    assert invoke("validate", str(file)).exit_code == 0
    assert invoke("validate", str(file), *elsewhere, "--set", "explorer.insecure=true").exit_code == 0
    assert invoke("validate", str(file), *elsewhere, "--set", "mode=train").exit_code == 0
    keys(file, "create", "--name", "web")
    assert invoke("validate", str(file), *elsewhere).exit_code == 0


def test_no_command_touches_the_database_of_another_experiment(ledger: Ledger, run: Run) -> None:
    ledger.own("shop", "assistant")
    for command in (("keys", "create", "--name", "web"), ("doctor",), ("alarms",)):
        with pytest.raises(EnvironmentRefused, match=r"belongs to shop/assistant, not to .*: give this experiment"):
            run(*command)
    assert ledger.keys.all() == []
