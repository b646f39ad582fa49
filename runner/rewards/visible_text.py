"""What a model, a tool or a stranger wrote, as a terminal may show it."""

import unicodedata

#: Controls, marks that change the direction of text, lone surrogates, and separators that begin a line.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})

#: They join or part letters, in emoji too, and do nothing else.
_JOINERS = "\u200c\u200d"


def visible(text: str, encoding: str | None = "utf-8") -> str:
    r"""The text with what commands a terminal, and what the encoding does not have, written as escapes.

    >>> visible("fine\x1b[2J\r\nnext\tone\u202e"), visible("¿qué?", "ascii")
    ('fine\\x1b[2J\nnext\tone\\u202e', '\\xbfqu\\xe9?')
    """
    shown = "".join(
        each
        if each in "\n\t" + _JOINERS or unicodedata.category(each) not in _HIDDEN
        else each.encode("unicode_escape").decode()
        for each in text.replace("\r\n", "\n")
    )
    return shown.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")
