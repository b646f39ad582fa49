"""Shows how far long work is, on a terminal's error stream and nowhere else: what is piped stays as it is."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer

_T = TypeVar("_T")

#: Rows between two updates: one for each would take longer than the row.
_STEP = 200


def with_progress(rows: Iterable[_T], label: str, *, step: int = _STEP) -> Iterator[_T]:
    """The rows, with a line that counts them, every `step` of them."""
    if not sys.stderr.isatty():
        yield from rows
        return
    with _bar(rows, label, update_min_steps=step) as shown:
        yield from shown


@contextmanager
def counting(label: str) -> Iterator[Callable[[int], object]]:
    """What is to be called with the rows that are done, whenever some are."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    with _bar(iter(int, 1), label) as bar:
        yield bar.update


def _bar(rows: Iterable[_T], label: str, **how: Any) -> Any:
    return typer.progressbar(rows, label=label, file=sys.stderr, show_eta=False, show_pos=True, **how)
