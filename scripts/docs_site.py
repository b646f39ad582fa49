"""Hooks of mkdocs: what mkdocs.yml cannot say of the site.

Pages link to files outside docs/ (examples, measurements), as they do in the repository. Such a file becomes a page of
the site below `source/`, and every link to it leads there, so that the site is whole without the repository. The
README is its first page, and what stands beside it is added to the navigation.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCE = "source"
HOME = "index.md"

#: Pages outside docs/ that the navigation shows, by the part of the site.
OUTSIDE = {
    "Operate": {"Security": "SECURITY.md", "Changes": "CHANGELOG.md"},
    "Understand": {"Contributing": "CONTRIBUTING.md", "Measurements": "benchmarks/RESULTS.md"},
}

_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^ *```")
_ITEM = re.compile(r"^([-*]|\d+\.) ")


def place(target: Path) -> str:
    """Where a file of the repository is in the site's folder of pages."""
    if target == ROOT / "README.md":
        return HOME
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    below = f"{SOURCE}/{target.relative_to(ROOT).as_posix()}"
    return below if target.suffix == ".md" else f"{below}.md"


def origin(uri: str) -> Path:
    """The file of the repository that a page is made of."""
    if uri == HOME:
        return ROOT / "README.md"
    if not uri.startswith(f"{SOURCE}/"):
        return DOCS / uri
    path = ROOT / uri.removeprefix(f"{SOURCE}/")
    return path if path.exists() else path.with_suffix("")


def links_of(file: Path) -> set[Path]:
    """The files of the repository that a page links to."""
    found = {
        (file.parent / target).resolve() for _, target, _, _ in _LINK.findall(file.read_text()) if ":" not in target
    }
    return {each for each in found if each.is_file()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation."""
    nav: list[dict[str, Any]] = config.nav or []
    parts: dict[str, Any] = {name: pages for each in nav for name, pages in each.items()}
    for part, pages in OUTSIDE.items():
        parts[part] += [{title: place(ROOT / path)} for title, path in pages.items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    waiting = [ROOT / "README.md", *(ROOT / path for pages in OUTSIDE.values() for path in pages.values())]
    waiting += [target for page in files.documentation_pages() for target in links_of(origin(page.src_uri))]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or path.is_relative_to(DOCS) or not path.is_relative_to(ROOT):
            continue
        seen.add(path)
        text = path.read_text()
        if path.suffix == ".md":
            waiting += links_of(path)
        else:
            text = f"# {path.relative_to(ROOT)}\n\n````{path.suffix[1:]}\n{text}````\n"
        files.append(File.generated(config, place(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the files are in the site, and begin lists as Python-Markdown wants it."""
    here = origin(page.file.src_uri)
    folder = os.path.dirname(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        target = (here.parent / match[2]).resolve()
        if ":" in match[2] or not target.is_relative_to(ROOT):
            return match[0]
        return f"{match[1]}{os.path.relpath(place(target), folder or '.')}{match[3] or ''}{match[4]}"

    lines: list[str] = []
    fenced = False
    for line in markdown.split("\n"):
        fenced ^= bool(_FENCE.match(line))
        if not fenced and _ITEM.match(line) and lines and lines[-1] and not _is_of_a_list(lines):
            lines.append("")
        lines.append(line if fenced else _LINK.sub(lead, line))
    return "\n".join(lines)


def _is_of_a_list(lines: list[str]) -> bool:
    """Whether the last line belongs to an item, which may go on over several lines."""
    for line in reversed(lines):
        if not line:
            return False
        if _ITEM.match(line):
            return True
    return False
