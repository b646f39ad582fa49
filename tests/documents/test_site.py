"""The site: mkdocs builds it without a warning, and it asks nobody else for anything."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.documents.page_files import PAGES, ROOT

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("material") is None and not os.environ.get("CI"),
    reason="mkdocs-material is not installed (pip install '.[docs]')",
)

#: What a browser fetches by itself, unlike a link that somebody follows.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|embed)\b[^>]*\bsrc=[\"']?(?:https?:)?//|@import|url\([\"']?(?:https?:)?//"
)
LINKED = re.compile(r"<link\b[^>]*\bhref=[\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@needs_mkdocs
def test_it_has_every_page_and_a_search(site: Path) -> None:
    built = {file.relative_to(site).as_posix() for file in site.rglob("*.html")}
    assert {"index.html", "settings.html", "methods.html", "source/benchmarks/RESULTS.html"} <= built
    assert len(built) >= len([page for page in PAGES if page.parent != ROOT])
    assert "how your application says what a reply was worth" in (site / "search" / "search_index.json").read_text()


@needs_mkdocs
def test_it_asks_nobody_else(site: Path) -> None:
    pages = {file.name: file.read_text() for file in site.rglob("*.html")}
    assert [name for name, text in pages.items() if FETCHED.search(text) or LINKED.search(text)] == []
    styles = [file.name for file in site.rglob("*.css") if FETCHED.search(file.read_text())]
    assert styles == []


def test_what_is_fetched_is_found() -> None:
    assert FETCHED.search('<script src="https://example.com/x.js">')
    assert LINKED.search('<link rel="stylesheet" href="https://example.com/x.css">')
    assert not FETCHED.search('<script src="assets/x.js">')
