"""Options: a new one is a visible line in a diff, documented, and every file that we ship loads."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo
from sources import ROOT

from tuneloop.shared.settings.loader import read_settings
from tuneloop.shared.settings.settings import Settings, options

FROZEN = Path(__file__).parent / "options.txt"
SHIPPED = [
    file
    for folder in ("examples", "deploy", "tests/fixtures")
    for file in sorted((ROOT / folder).rglob("*.y*ml"))
    if re.search(r"^model:", file.read_text(), re.MULTILINE)
]


BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def kinds() -> dict[str, str]:
    """The type of every option, as docs/settings.md writes it."""
    schema = Settings.model_json_schema()
    found: dict[str, str] = {}

    def walk(section: dict[str, Any], prefix: str) -> None:
        for name, option in section["properties"].items():
            if "$ref" in option:
                walk(schema["$defs"][option["$ref"].rpartition("/")[2]], f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = kind(option)

    walk(schema, "")
    return found


def kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(kind(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema["type"] == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        return f"list of {f'{len(items)} x ' if len(items) > 1 else ''}{kind(items[0])}"
    bounds = [f"{sign} {schema[name]:g}" for name, sign in BOUNDS.items() if name in schema]
    return " ".join([schema.get("format") or schema["type"], *bounds])


def default(field: FieldInfo) -> str:
    """A default as an operator writes it in YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else str(value)


def test_the_options_are_those_that_were_agreed_on():
    """Changed on purpose? Put the new line into options.txt, and the option into docs/settings.md."""
    kind_of = kinds()
    now = [f"{key}: {kind_of[key]} = {default(field)}" for key, field in options()]
    assert now == FROZEN.read_text().splitlines()


def documented() -> dict[str, tuple[str, str]]:
    row = re.compile(r"^\| `([\w.]+)` \| ([^|]*) \| `([^|]*)` \| [^|]+ \|$", re.MULTILINE)
    return {key: (kind, default) for key, kind, default in row.findall((ROOT / "docs" / "settings.md").read_text())}


def test_every_option_is_documented_with_its_type_and_default():
    kind_of = kinds()
    assert documented() == {key: (kind_of[key], default(field)) for key, field in options()}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_shipped_settings_file_loads(file):
    assert read_settings(file, environment={}).problems == ()


def test_settings_files_are_shipped():
    assert len(SHIPPED) >= 2
