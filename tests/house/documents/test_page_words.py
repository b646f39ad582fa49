"""The documentation is short enough to be read: things are said once, and linked."""

import re
from pathlib import Path

from page_files import DOCS, prose_of

#: What is generated from the code, or compared with it row by row by a test, or a paragraph for each alert: looked up,
#: and not read.
REFERENCE = {
    "agentscope_tuner.md",
    "api.md",
    "architectures.md",
    "client_packages.md",
    "command_line.md",
    "decisions.md",
    "kept.md",
    "limits.md",
    "metrics.md",
    "reasons.md",
    "runbooks.md",
    "settings.md",
    "states.md",
    "tune_options.md",
    "vllm.md",
}

#: Never more.
WORDS = 25_000


def words_of(page: Path) -> int:
    return sum(1 for word in prose_of(page.read_text()).split() if re.search(r"\w", word))


def counted() -> dict[str, int]:
    """How many words each page has, tables and headings too, without blocks of code.

    A word has a letter or a digit: the lines of a table, and dashes, are none.
    """
    return {p.relative_to(DOCS).as_posix(): words_of(p) for p in DOCS.rglob("*.md") if p.name not in REFERENCE}


def test_there_are_no_more_words_than_somebody_reads() -> None:
    words = counted()
    total = sum(words.values())
    longest = sorted(words, key=lambda page: -words[page])[:5]
    assert total <= WORDS, f"{total} words; the longest: {', '.join(f'{page} {words[page]}' for page in longest)}"
