"""The README: its settings load, its Python compiles, and the commands and pages that it names are there."""

import re
from pathlib import Path

import pytest
from sources import ROOT

from tuneloop.shared.settings.loader import read_settings

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_its_settings_load_without_a_warning(tmp_path: Path) -> None:
    [block] = blocks("yaml")
    (tmp_path / "tuneloop.yaml").write_text(block)
    report = read_settings(tmp_path / "tuneloop.yaml", environment={})
    assert (report.problems, report.warning) == ((), None)


@pytest.mark.parametrize("block", blocks("python"))
def test_its_python_compiles(block: str) -> None:
    compile(block, "README.md", "exec")


def test_its_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)) <= targets


def test_its_pages_exist() -> None:
    pages = re.findall(r"\]\(([^)#:]+)\)", README)
    assert pages
    assert [page for page in pages if not (ROOT / page).exists()] == []
