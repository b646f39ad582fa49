"""Finds tasks that say the same: exactly, but for case and white space, or nearly, by the shingles that they share. Pure.

Texts with different numbers in them are different tasks, however alike they are: 3+4 is not 3+5.
"""

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tuneloop.runner.rewards.reply import text_of
from tuneloop.runner.tasks.task_set import ImportedTask

#: Characters of a shingle; of characters and not of words, for not every language writes spaces.
_SHINGLE = 5

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
    earlier, later = [_Text(each) for each in against], [_Text(each) for each in tasks]
    frequency = Counter(shingle for each in [*earlier, *later] for shingle in each.question)
    whole: dict[str, str] = {}
    by_shingle: dict[object, list[_Text]] = defaultdict(list)
    kept: list[ImportedTask] = []
    exact: dict[str, str] = {}
    close: dict[str, str] = {}
    for place, each in enumerate([*earlier, *later]):
        rare = [] if near is None else each.rarest(near, frequency)
        if place >= len(earlier):
            if original := whole.get(each.whole):
                exact[each.task.task_id] = original
                continue
            alike = Counter(other for shingle in rare for other in by_shingle.get(shingle, ()))
            # A long prompt of the system would make all questions below it alike.
            found = (other for other, _ in alike.most_common() if each.is_near(other, near or 1))
            if (other := next(found, None)) is not None:
                close[each.task.task_id] = other.task.task_id
                continue
            kept.append(each.task)
        whole.setdefault(each.whole, each.task.task_id)
        for shingle in rare:
            by_shingle[shingle].append(each)
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
        self.task = task
        self.whole = "\n".join(turns)
        self.question = _shingles(normalise(task.question))
        self.context = _shingles("\n".join(turns[:-1]))
        self.numbers = tuple(sorted(_NUMBER.findall(self.whole)))

    def rarest(self, near: float, frequency: Counter[str]) -> list[object]:
        """So many of its rarest shingles that a question which shares none of them cannot be near (prefix filtering).

        Texts with other numbers shall not even be looked at: there may be thousands from one template.
        """
        ordered = sorted(self.question, key=lambda each: (frequency[each], each))
        return [(self.numbers, each) for each in ordered[: len(ordered) - math.ceil(near * len(ordered)) + 1]]

    def is_near(self, other: "_Text", near: float) -> bool:
        """Whether both say nearly the same after nearly the same."""
        pairs = ((self.question, other.question), (self.context, other.context))
        return all(len(one & two) >= near * len(one | two) for one, two in pairs)


def _shingles(text: str) -> set[str]:
    return {text[at : at + _SHINGLE] for at in range(max(1, len(text) - _SHINGLE + 1))}
