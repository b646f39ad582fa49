"""The documentation as Markdown: its pages, their blocks of code, headings and links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"

#: Every page that users or contributors read.
PAGES = sorted(
    [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "runner" / "README.md", ROOT / "benchmarks" / "RESULTS.md"]
)

_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code: where it begins, its language, and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        yield Block(name_of(page), text.count("\n", 0, match.start()) + 1, match[2], match[3])


def part_below(text: str, heading: str) -> str:
    """What stands below a heading, up to the next one that is no lower. Raises ValueError without it."""
    prose = _BLOCK.sub(lambda block: "." * len(block[0]), text)
    found = re.search(rf"^(#+) {re.escape(heading)}\n", prose, re.MULTILINE)
    if found is None:
        raise ValueError(f"no heading {heading!r}")
    following = re.compile(rf"^#{{1,{len(found[1])}}} ", re.MULTILINE).search(prose, found.end())
    return text[found.end() : following.start() if following else None]


def python_of(page: str, *headings: str) -> list[str]:
    """The blocks of Python of a page of docs/, or of these of its sections."""
    text = (DOCS / page).read_text()
    parts = [part_below(text, heading) for heading in headings] or [text]
    return [match[3] for part in parts for match in _BLOCK.finditer(part) if match[2] == "python"]


def prose_of(text: str) -> str:
    """A page without its blocks of code."""
    return _BLOCK.sub("", text)


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page.read_text()), re.MULTILINE)
    found: list[str] = []
    for heading in headings:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return frozenset(found)


def links_of(page: Path) -> Iterator[tuple[str, str]]:
    """The path and the anchor of each link of a page that leads to a file; the path may be empty."""
    prose = re.sub(r"`[^`\n]*`", "", prose_of(page.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor
