"""Options: a new one is a visible line in a diff, documented, and every file that we ship loads."""

import re
import runpy
from pathlib import Path

import pytest
from sources import ROOT

from tuneloop.shared.settings.loader import read_settings
from tuneloop.shared.settings.problems import _REMOVED
from tuneloop.shared.settings.settings import constants, options

REFERENCE = runpy.run_path(str(ROOT / "scripts" / "reference.py"))
FROZEN = Path(__file__).parent / "options.txt"
SHIPPED = [
    file
    for folder in ("examples", "deploy", "tests/fixtures")
    for file in sorted((ROOT / folder).rglob("*.y*ml"))
    if re.search(r"^model:", file.read_text(), re.MULTILINE)
]


def test_the_options_are_those_that_were_agreed_on():
    """Changed on purpose? Put the new line into options.txt, and the option into docs/settings.md."""
    types = REFERENCE["option_types"]()
    now = [f"{key}: {types[key]} = {REFERENCE['default_of'](field)}" for key, field in options()]
    assert now == FROZEN.read_text().splitlines()


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_shipped_settings_file_loads(file):
    assert read_settings(file, environment={}).problems == ()


def test_settings_files_are_shipped_and_removed_options_are_among_the_changes():
    assert len(SHIPPED) >= 2
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in [*_REMOVED, *dict(constants())] if f"`{name}`" not in changes] == []
