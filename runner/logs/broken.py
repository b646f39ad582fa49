"""Entries of a log that cannot be read: counted by kind, the first ones named."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from tuneloop.runner.errors import LogRefused

#: What reading an entry raises that is not as it should be.
UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)

_NAMED = 3  # of each kind


class BrokenEntries:
    """What could not be read of one or several logs, and was left out; `strict` ends the reading at the first one.

    >>> broken = BrokenEntries()
    >>> broken.add("not JSON", "log.jsonl:17", "Expecting value")
    >>> broken.total, list(broken.report())
    (1, ['1 not JSON: log.jsonl:17: Expecting value'])
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._first: defaultdict[str, list[str]] = defaultdict(list)
        #: How many, by kind.
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, where: str, why: object) -> None:
        """Count one. Raises LogRefused if it is strict."""
        said = f"{where}: {' '.join(str(why).split())[:200]}"
        if self._strict:
            raise LogRefused(said) from None
        self.counts[kind] += 1
        if len(self._first[kind]) < _NAMED:
            self._first[kind].append(said)

    @property
    def total(self) -> int:
        """How many there are."""
        return self.counts.total()

    def report(self) -> Iterator[str]:
        """A line for each kind, the most frequent first, with where the first ones stand."""
        for kind, count in self.counts.most_common():
            more = "; ..." if count > _NAMED else ""
            yield f"{count} {kind}: {'; '.join(self._first[kind])}{more}"
