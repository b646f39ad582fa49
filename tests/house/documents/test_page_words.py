"""The documentation is short enough to be read: things are said once, and linked."""

from page_files import DOCS, prose_of

#: What is generated from the code, or compared with it row by row by a test, or a paragraph for each alert: looked up,
#: and not read.
REFERENCE = {"api.md", "command_line.md", "limits.md", "metrics.md", "runbooks.md", "settings.md", "vllm.md"}

#: May only fall. 25 000 is the aim.
WORDS = 40_600


def counted() -> dict[str, int]:
    """How many words each page has, tables and headings too, without blocks of code and the decisions."""
    pages = [page for page in DOCS.rglob("*.md") if page.name not in REFERENCE and page.parent.name != "decisions"]
    return {page.relative_to(DOCS).as_posix(): len(prose_of(page.read_text()).split()) for page in pages}


def test_there_are_no_more_words_than_somebody_reads() -> None:
    words = counted()
    total = sum(words.values())
    longest = sorted(words, key=lambda page: -words[page])[:5]
    assert total <= WORDS, f"{total} words; the longest: {', '.join(f'{page} {words[page]}' for page in longest)}"


def test_the_bound_is_not_left_above_what_there_is() -> None:
    """When pages are cut, lower the bound."""
    assert WORDS == 25_000 or sum(counted().values()) > WORDS - 1_500
