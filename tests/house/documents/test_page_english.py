"""The pages are read once: few, short, each with its purpose first, in short sentences and the field's own words."""

import re
from pathlib import Path

import pytest
from page_files import DOCS, ROOT, name_of, prose_of

#: Words of the pages as `wc -w` counts them, without and with the decisions. Nineteen of twenty sentences are short.
MOST_PAGES, MOST_WORDS, MOST_WITH_DECISIONS, LONG_SENTENCE = 25, 28_000, 30_000, 25

#: Pictures, and words in the order of another language, as regular expressions with what to write instead.
REFUSED = dict(line.split(" = ") for line in (Path(__file__).parent / "refused_words.txt").read_text().splitlines())

PAGES = sorted(page for page in DOCS.rglob("*.md") if page.name != "decisions.md")


def words_of(text: str) -> int:
    """A word has a letter or a digit: the lines of a table, and dashes, are none."""
    return sum(1 for word in text.split() if re.search(r"\w", word))


def sentences_of(page: Path) -> list[int]:
    """How many words each sentence of text and lists has; code is one word, and a row of a table is no sentence."""
    prose = re.sub(r"^    .*$", "", prose_of(page.read_text()), flags=re.MULTILINE)
    prose = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", prose))
    parts = re.split(r"\n\s*\n|\n(?=[-*] |\d+\. |#|\|)", prose)
    texts = [part for part in parts if not part.lstrip().startswith(("#", "|", "<!--", "!["))]
    lengths = [words_of(each) for text in texts for each in re.split(r"(?<=[.!?])[)\"*]*\s+", text)]
    return sorted(length for length in lengths if length)


def test_there_are_few_pages_and_few_words() -> None:
    words = {page: len(page.read_text().split()) for page in DOCS.rglob("*.md")}
    assert len(PAGES) <= MOST_PAGES
    assert sum(words[page] for page in PAGES) <= MOST_WORDS, sorted(PAGES, key=lambda page: -words[page])[:5]
    assert sum(words.values()) <= MOST_WITH_DECISIONS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_its_first_sentence_says_what_it_is_for_and_most_are_short(page: Path) -> None:
    assert re.match(r"# .+\n\nThis page (?:shows|lists|says|explains|takes|helps|is)\b", page.read_text())
    lengths = sentences_of(page)
    assert lengths[int(len(lengths) * 0.95)] <= LONG_SENTENCE, f"the longest have {lengths[-8:]} words"


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "runner/README"))],
    ids=name_of,
)
def test_its_words_are_the_fields(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", prose_of(page.read_text()))
    assert {found[0]: instead for word, instead in REFUSED.items() for found in re.finditer(word, prose)} == {}
