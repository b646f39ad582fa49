"""SECURITY.md: the pages, settings and targets that it names are there."""

import re

from sources import ROOT

from tuneloop.shared.settings.settings import options

TEXT = (ROOT / "SECURITY.md").read_text()


def test_its_pages_exist() -> None:
    pages = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert pages
    assert [page for page in pages if not (ROOT / page).exists()] == []


def test_its_settings_and_targets_exist() -> None:
    known = {key for key, _ in options()}
    assert set(re.findall(r"`(explorer\.\w+)`", TEXT)) <= known
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"audit", "sbom", "soak"} <= set(re.findall(r"`make ([a-z]+)`", TEXT)) <= targets
