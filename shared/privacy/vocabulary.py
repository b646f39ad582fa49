"""Maps token ids to bytes, read from the model's `tokenizer.json` without a library.

The map finds the ids of a prompt or reply that spell a span of text; a token has the same bytes everywhere.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import orjson

from tuneloop.shared.experience import Int32s
from tuneloop.shared.settings.hub_cache import cached_folder

_FILE = "tokenizer.json"

_BLANK = "▁"

#: GPT-2's letter for each byte: its own where that can be seen, else one from 256 on.
_SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(each): each for each in _SEEN}
_BYTES |= {chr(256 + at): each for at, each in enumerate(each for each in range(256) if each not in _SEEN)}


class Vocabulary:
    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        self._pieces = pieces
        self._whole = None not in pieces

    @classmethod
    def load(cls, model: Path) -> Self | None:
        """That of a model, by its folder or its name in Hugging Face's cache; None where it is unknown."""
        try:
            return cls(_pieces(orjson.loads((cached_folder(model) / _FILE).read_bytes())))
        except (OSError, LookupError, TypeError, ValueError, AttributeError):
            return None

    def spell(self, ids: Int32s) -> list[bytes] | None:
        piece_of = self._pieces.__getitem__
        try:
            if ids.min(initial=0) >= 0:
                found = list(map(piece_of, ids.tolist()))
            else:  # some are REDACTED
                found = [piece_of(each) if each >= 0 else b"" for each in ids.tolist()]
        except IndexError:
            return None
        return found if self._whole or None not in found else None  # type: ignore[return-value]


class Spelling:
    def __init__(self, pieces: Sequence[bytes]) -> None:
        data = b"".join(pieces)
        self.text = data.decode("utf-8", "surrogateescape")
        self._ascii = len(self.text) == len(data)
        self._pieces = pieces

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self._pieces)))

    def tokens(self, start: int, end: int) -> range:
        """The tokens that spell the characters from `start` to `end`, if only in part."""
        first, last = self._byte(start), self._byte(end)
        return range(bisect_right(self._ends, first), bisect_left(self._ends, last) + 1)

    def _byte(self, character: int) -> int:
        return character if self._ascii else len(self.text[:character].encode("utf-8", "surrogateescape"))


def _pieces(described: dict[str, Any]) -> list[bytes | None]:
    """The bytes of every id. Raises ValueError for a tokenizer whose tokens do not stand for bytes one by one."""
    model = described["model"]
    decoders = set(_types(described.get("decoder")))
    if "ByteLevel" in decoders:
        bytes_of = _by_bytes
    elif decoders & {"Metaspace", "ByteFallback"}:
        bytes_of = _by_blanks
    else:
        raise ValueError(f"tokens are decoded by {decoders or 'nothing'}")
    words = model["vocab"]
    numbered = words.items() if isinstance(words, dict) else ((word, at) for at, (word, _score) in enumerate(words))
    found = {number: bytes_of(word) for word, number in numbered}
    found |= {each["id"]: each["content"].encode() for each in described.get("added_tokens") or ()}
    return [found.get(number) for number in range(max(found) + 1)]


def _types(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield decoder["type"]
        for each in decoder.get("decoders") or ():
            yield from _types(each)


def _by_bytes(word: str) -> bytes:
    try:
        return bytes([_BYTES[each] for each in word])
    except KeyError:  # a special token
        return word.encode()


def _by_blanks(word: str) -> bytes:
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes([int(word[3:5], 16)])
    return word.replace(_BLANK, " ").encode()
