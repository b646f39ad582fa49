"""The README: short, and its settings and make targets are there. Its Python runs in tests/documents."""

import re
from pathlib import Path

import pytest
from page_files import ROOT, blocks_of

from tuneloop.shared.settings.loader import read_settings

pytestmark = pytest.mark.contract

README = ROOT / "README.md"


def test_its_settings_load_without_a_warning(tmp_path: Path) -> None:
    [block] = [each for each in blocks_of(README) if each.language == "yaml"]
    (tmp_path / "tuneloop.yaml").write_text(block.text)
    report = read_settings(tmp_path / "tuneloop.yaml", environment={})
    assert (report.problems, report.warning) == ((), None)


def test_its_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", README.read_text(), re.MULTILINE))
    assert {"demo", "test", "docs"} <= named <= targets


def test_it_is_a_screen_and_a_half() -> None:
    """Of an editor: 60 lines of text each, the picture not counted."""
    assert README.read_text().count("\n") <= 90
