"""Finds tasks that say the same: exactly, but for case and white space, or nearly, by MinHash of their shingles. Pure.

Texts with different numbers in them are different tasks, however alike they are: 3+4 is not 3+5.
"""

import hashlib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuneloop.runner.rewards.reply import text_of
from tuneloop.runner.tasks.task_set import ImportedTask

#: Characters of a shingle; of characters and not of words, for not every language writes spaces.
_SHINGLE = 5

#: Places of a signature, and how many of them make a band. Of texts whose shingles are four fifths the same, 999 of
#: 1000 pairs share a band.
_PLACES, _IN_A_BAND = 64, 4

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True, slots=True)
class Deduplicated:
    """Those that are left, the first of each kind, and of which task each other one is a duplicate, by their ids."""

    kept: tuple[ImportedTask, ...]
    exact: dict[str, str]
    near: dict[str, str]


def deduplicate(
    tasks: Iterable[ImportedTask], *, near: float | None = 0.8, against: Iterable[ImportedTask] = ()
) -> Deduplicated:
    """The tasks without those that repeat an earlier one, or one of `against`.

    `near` is the share of common shingles (Jaccard's index) from which on two texts are one, None for never: of the
    questions, and of what stood before them.
    """
    if near is not None and not 0 < near <= 1:
        raise ValueError(f"near: {near} must be above 0 and at most 1, or None")
    index = _Index(near)
    for each in against:
        index.add(each)
    kept: list[ImportedTask] = []
    exact: dict[str, str] = {}
    close: dict[str, str] = {}
    for each in tasks:
        original, same = index.find(each)
        if original is None:
            index.add(each)
            kept.append(each)
        else:
            (exact if same else close)[each.task_id] = original
    return Deduplicated(tuple(kept), exact, close)


def normalise(text: str) -> str:
    """A text without what makes no difference: case, white space, and how characters are written.

    >>> normalise("Where  is\\nmy PARCEL?")
    'where is my parcel?'
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def likeness(one: str, other: str) -> float:
    """The share of the shingles of two texts that both have."""
    a, b = _shingles(normalise(one)), _shingles(normalise(other))
    return len(a & b) / len(a | b)


class _Text:
    """A task as it is compared: its question, and what stood before it."""

    def __init__(self, task: ImportedTask) -> None:
        turns = [f"{each['role']}: {normalise(text_of(each.get('content')))}" for each in task.messages]
        self.task_id = task.task_id
        self.whole = "\n".join(turns)
        self.question = _shingles(normalise(task.question))
        self.context = _shingles("\n".join(turns[:-1]))
        self._numbers = tuple(sorted(_NUMBER.findall(self.whole)))

    def bands(self) -> list[tuple[object, ...]]:
        signature = _signature(self.question)
        # Texts with other numbers shall not even be looked at: there may be thousands from one template.
        return [(at, self._numbers, *signature[at : at + _IN_A_BAND]) for at in range(0, _PLACES, _IN_A_BAND)]


class _Index:
    """What was seen: whole texts by themselves, and by the bands of their questions' signatures."""

    def __init__(self, near: float | None) -> None:
        self._near = near
        self._exact: dict[str, str] = {}
        self._bands: dict[tuple[object, ...], list[_Text]] = defaultdict(list)

    def find(self, task: ImportedTask) -> tuple[str | None, bool]:
        """The id of a task that says the same, and whether exactly."""
        text = _Text(task)
        if text.whole in self._exact:
            return self._exact[text.whole], True
        if self._near is None:
            return None, False
        alike = Counter(each for band in text.bands() for each in self._bands.get(band, ()))
        for other, _ in alike.most_common():
            # A long prompt of the system would make all questions below it alike.
            if self._close(text.question, other.question) and self._close(text.context, other.context):
                return other.task_id, False
        return None, False

    def add(self, task: ImportedTask) -> None:
        text = _Text(task)
        self._exact.setdefault(text.whole, task.task_id)
        if self._near is not None:
            for band in text.bands():
                self._bands[band].append(text)

    def _close(self, one: set[str], other: set[str]) -> bool:
        return self._near is not None and len(one & other) >= self._near * len(one | other)


def _shingles(text: str) -> set[str]:
    return {text[at : at + _SHINGLE] for at in range(max(1, len(text) - _SHINGLE + 1))}


def _signature(shingles: Iterable[str]) -> Sequence[int]:
    """MinHash with one hash of each shingle, which chooses its place too; an empty place borrows from the next.

    Li, Owen and Zhang, One Permutation Hashing, NIPS 2012; Shrivastava and Li, ICML 2014, for the empty places.
    """
    least: list[int | None] = [None] * _PLACES
    for each in shingles:
        number = int.from_bytes(hashlib.blake2b(each.encode(errors="replace"), digest_size=8).digest())
        place, value = number % _PLACES, number // _PLACES
        before = least[place]
        least[place] = value if before is None else min(before, value)
    signature = []
    for place in range(_PLACES):
        away = next(step for step in range(_PLACES) if least[(place + step) % _PLACES] is not None)
        signature.append(hash((least[(place + away) % _PLACES], away)))
    return signature
