"""Every link of the documentation leads somewhere: to a file that is there, and to a heading that it has."""

import re
from pathlib import Path

import pytest
from page_files import DOCS, PAGES, ROOT, anchors_of, blocks_of, links_of, name_of

#: Where a sentence of the code names a page.
NAMED = re.compile(r"docs/[\w/]+\.md(?:#[\w-]+)?")
FOLDERS = (
    "shared",
    "explorer",
    "trainer",
    "cli",
    "runner",
    "migrations",
    "deploy",
    "scripts",
    "examples",
    "benchmarks",
)


def broken(page: Path) -> list[str]:
    found = []
    for path, anchor in links_of(page):
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors_of(target)):
            found.append(f"{path}#{anchor}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_its_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken(page) == []


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A b\n[x](#a-b) [y](#c) [z](gone.md)\n```sh\n[w](none.md)\n```\n`[v](none.md)` [u](https://example.com)\n"
    )
    assert broken(page) == ["#c", "gone.md#"]


def test_pages_that_the_code_names_are_there() -> None:
    files = [
        file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in {".py", ".service", ".md"}
    ]
    for file in files:
        for named in NAMED.findall(file.read_text()):
            path, _, anchor = named.partition("#")
            assert (ROOT / path).is_file(), f"{name_of(file)} names {named}"
            assert not anchor or anchor in anchors_of(ROOT / path), f"{name_of(file)} names {named}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f": {page.name}\n" not in navigation] == []


def test_every_block_ends() -> None:
    """A fence that is not closed swallows what follows, links too."""
    odd = [name_of(page) for page in PAGES if len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) % 2]
    assert odd == []
    assert all(sum(1 for _ in blocks_of(page)) == page.read_text().count("```") // 2 for page in PAGES)
