"""How command lines are read, whatever the command: its settings file, its options for programs, its misspelling."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml

from tests.cli.test_main import settings_file, start, tuneloop
from tuneloop.cli.command_group import name_settings_file
from tuneloop.cli.main import app
from tuneloop.shared.settings.settings import Settings

ROOT = typer.main.get_command(app)

#: Commands that report nothing: they become services, or print what is written for programs anyway.
REPORT_NOTHING = {
    "init",
    "keys create",
    "run",
    "serve",
    "train",
    "debug",
    "tune",
    "schema",
    "config schema",
    "outbox show",
    "outbox drain",
}


def commands(group=ROOT, before: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= commands(command, f"{before}{name} ") if inner else {f"{before}{name}": command}
    return found


def flags(command) -> set[str]:
    return {flag for each in command.params for flag in each.opts}


ALL = commands()


@pytest.mark.parametrize("path", sorted(set(ALL) - {"debug", "tune", "schema", "config schema", "init"}))
def test_every_command_takes_the_settings_file_alike(path: str) -> None:
    command = ALL[path]
    assert {"--config", "-c"} <= flags(command)
    for written in (["x.yaml"], ["-c", "x.yaml"], ["--config=x.yaml"]):
        named = name_settings_file(command, [*written, "--set", "a.b=c.yaml"])
        assert named[0] in {"--config", "-c", "--config=x.yaml"}
        assert named[-2:] == ["--set", "a.b=c.yaml"]


@pytest.mark.parametrize("path", sorted(set(ALL) - REPORT_NOTHING))
def test_every_command_that_reports_does_so_for_programs(path: str) -> None:
    assert "--json" in flags(ALL[path])


def test_every_command_and_its_options_of_services_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    named = {word for each in re.findall(r"`([^`]+)`", page) for word in [each.removeprefix("tuneloop ")]}
    groups = {name for name, each in ROOT.commands.items() if hasattr(each, "commands")}
    for path in ALL:
        group, _, last = path.rpartition(" ")
        assert path in named or (group in groups and last in named), path
    assert {"--json", "--log-json", "--show-completion", "TUNELOOP_LOG_LEVEL"} <= named
    assert all(f"`{flag}" in page for flag in ("--log-level", "TUNELOOP_LOG_JSON"))


def test_the_file_is_found_among_other_arguments() -> None:
    show, imported = ALL["versions show"], ALL["import"]
    assert name_settings_file(show, ["3", "x.yml"]) == ["3", "--config", "x.yml"]
    assert name_settings_file(imported, ["rows.jsonl", "x.yaml"]) == ["rows.jsonl", "--config", "x.yaml"]
    assert name_settings_file(imported, ["rows.jsonl"]) == ["rows.jsonl"]
    assert name_settings_file(ALL["validate"], ["settings"]) == ["--config", "settings"]
    assert name_settings_file(ROOT.commands["alarms"], ["clear", "x.yaml"]) == ["clear", "x.yaml"]
    assert name_settings_file(ROOT.commands["alarms"], ["--all", "x.yaml"]) == ["--all", "--config", "x.yaml"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("srve", "'serve'"),
        ("rollback", "'versions rollback'"),
        ("upgrade", "'db upgrade'"),
        ("versions promot", "'promote'"),
        ("expotr", "'export'"),
    ],
)
def test_an_unknown_command_is_answered_with_what_may_be_meant(typed: str, meant: str) -> None:
    code, out, error = tuneloop(*typed.split())
    assert (code, out) == (2, "")
    assert f"there is no command '{typed.split()[-1]}'. Did you mean {meant}" in error


def test_a_word_like_no_command_is_not_guessed_at() -> None:
    assert "there is no command 'qqq'; tuneloop --help lists them all" in tuneloop("qqq")[2]


def test_validate_tells_programs_what_it_understood_and_what_is_wrong(tmp_path: Path) -> None:
    file = settings_file(tmp_path)
    code, out, _ = tuneloop("validate", "--json", "--config", file)
    told = json.loads(out)
    assert (code, told["valid"], told["problems"], told["mode"]) == (0, True, [], "both")
    assert told["file"] == str(file)
    code, out, error = tuneloop("validate", "--json", file, "--set", "mode=x")
    assert (code, error) == (2, "")
    assert json.loads(out)["problems"] == ["--set mode: mode: must be 'serve', 'train' or 'both', not 'x'"]


@pytest.mark.parametrize("command", [("schema",), ("config", "schema")])
def test_the_schema_of_the_settings_takes_good_files_and_refuses_bad_ones(command: tuple[str, ...]) -> None:
    schema = json.loads(tuneloop(*command)[1])
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == Settings.model_json_schema()["title"]
    check = jsonschema.Draft202012Validator(schema)
    examples = Path(__file__).parents[2] / "examples" / "production_feedback"
    good = yaml.safe_load(next(examples.glob("*.yaml")).read_text())
    assert list(check.iter_errors(good)) == []
    assert [
        each for gate in ("block", False, {"mode": "off"}) for each in check.iter_errors({**good, "gate": gate})
    ] == []
    assert [error.validator for error in check.iter_errors({**good, "gate": "blok"})] == ["anyOf"]
    assert [error.validator for error in check.iter_errors({**good, "mode": "srve"})] == ["enum"]
    assert [error.validator for error in check.iter_errors({**good, "nmae": "x"})] == ["additionalProperties"]


def test_the_schema_says_in_editors_what_every_option_means() -> None:
    definitions = json.loads(tuneloop("schema")[1])["$defs"]
    texts = {
        f"{section}.{name}": option.get("description", "")
        for section, each in definitions.items()
        for name, option in each["properties"].items()
        if "$ref" not in option
    }
    assert [name for name, text in texts.items() if not text] == []
    assert [name for name, text in texts.items() if re.search(r"\]\(|_Serve|_Train|\n", text)] == []
    assert texts["ModelSettings.temperature"].endswith("sets none. Read by the explorer.")
    assert texts["OptimizerSettings.bits"].startswith("Bits of AdamW's two moments; 8 take a quarter of the memory.")


def test_shells_complete_commands_and_options() -> None:
    def complete(words: str) -> list[str]:
        return tuneloop(_TUNELOOP_COMPLETE="complete_bash", COMP_WORDS=f"tuneloop {words}", COMP_CWORD="1")[1].split()

    assert {"serve", "train", "schema"} <= set(complete(""))
    assert complete("vers") == ["versions"]


@pytest.mark.parametrize(("command", "service"), [("serve", "explorer"), ("train", "trainer")])
def test_serve_and_train_become_the_services_whatever_the_mode(tmp_path, services, command, service) -> None:
    process = start(command, settings_file(tmp_path), "--set", "name=n", path=services)
    said = json.loads(process.stdout.readline().removeprefix(f"{service} "))
    assert said[2:] == ["--set", "name=n", "--set", f"mode={command}"]
    process.terminate()
    process.communicate(timeout=10)


def test_how_services_log_goes_on_to_them(tmp_path, services) -> None:
    file = settings_file(tmp_path)
    (services / "tuneloop" / "explorer" / "__main__.py").write_text(
        "import os; os.write(1, (os.environ['TUNELOOP_LOG_LEVEL'] + os.environ['TUNELOOP_LOG_JSON']).encode())"
    )
    assert tuneloop("serve", file, "--log-level", "warning", "--log-json", path=services)[1] == "warning1"
    assert "Invalid value for '--log-level'" in tuneloop("serve", file, "--log-level", "loud", path=services)[2]
