"""Says while an evaluation goes on how many of its questions are answered."""

import time
from collections.abc import Callable

import structlog

#: Seconds between two lines.
EVERY_S = 10.0

_log = structlog.get_logger()


class EvaluationProgress:
    """One evaluation of so many questions; nothing is said of one that is over before the first line is due."""

    def __init__(self, of: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._of, self._clock = of, clock
        self._answered = 0
        self._next = clock() + EVERY_S

    def add(self, count: int = 1) -> None:
        self._answered += count
        if self._clock() >= self._next and self._answered < self._of:
            self._next = self._clock() + EVERY_S
            _log.info("evaluating", answered=self._answered, of=self._of)
