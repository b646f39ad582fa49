"""The figures of an evaluation: means over the tasks, of all of them and of each slice. Pure."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

import structlog

from tuneloop.shared.errors import NotEvaluated
from tuneloop.shared.evaluation.tasks import Task, matches_format, without_reasoning

SCORE, LENGTH, REFUSALS, MALFORMED = "score", "reply_length", "refusals", "malformed"

#: Not a measure: which tasks were evaluated, as their `fingerprint`. Figures on others cannot be compared.
TASKS = "tasks"

# The share of replies that may lack a verdict of the judge; with more, there is no evaluation.
_MAX_UNJUDGED = 0.1


class Figure(NamedTuple):
    """The mean of a metric over `samples` tasks: all of them, or those of a slice where it has a name."""

    metric: str
    slice: str
    value: float
    deviation: float
    samples: int


class TaskReply(NamedTuple):
    """A task, its reply with tokens and score (None: no verdict), and whether the reply is `whole`."""

    task: Task
    reply: str
    tokens: int
    score: float | None
    whole: bool = True


def figures_on(figures: tuple[Figure, ...], fingerprint: int) -> tuple[Figure, ...]:
    evaluated_tasks = next((each.value for each in figures if each.metric == TASKS), None)
    return figures if evaluated_tasks == fingerprint else ()


def figures_of(
    replies: Sequence[TaskReply], *, fingerprint: int, refusals: Iterable[re.Pattern[str]]
) -> tuple[Figure, ...]:
    """The figures of one version; only the fingerprint without replies. Raises NotEvaluated for want of verdicts."""
    evaluated_tasks = Figure(TASKS, "", float(fingerprint), 0.0, max(1, len(replies)))
    if not replies:
        return (evaluated_tasks,)
    judged = [each for each in replies if each.score is not None]
    if len(replies) - len(judged) > _MAX_UNJUDGED * len(replies):
        raise NotEvaluated(f"the judge has no verdict on {len(replies) - len(judged)} of {len(replies)} replies")
    scores: dict[str, list[float]] = defaultdict(list)
    for each in judged:
        for part in ("", *([each.task.slice] if each.task.slice else [])):
            scores[part].append(each.score or 0.0)
    patterns = list(refusals)
    lacking = [
        float(not (each.whole and matches_format(form, without_reasoning(each.reply))))
        for each in replies
        if (form := each.task.form) is not None
    ]
    refused = [float(any(pattern.search(each.reply) for pattern in patterns)) for each in replies]
    return (
        evaluated_tasks,
        *(mean(SCORE, values, part) for part, values in sorted(scores.items())),
        mean(LENGTH, [float(each.tokens) for each in replies]),
        mean(REFUSALS, refused),
        *([mean(MALFORMED, lacking)] if lacking else []),
    )


def mean(metric: str, values: Sequence[float], part: str = "") -> Figure:
    return Figure(metric, part, fmean(values), pstdev(values), len(values))


EVERY_S = 10.0

_log = structlog.get_logger()


class EvaluationProgress:
    """Progress of one evaluation; logs nothing for one that ends before the first line is due."""

    def __init__(self, of: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._of, self._clock = of, clock
        self._answered = 0
        self._next = clock() + EVERY_S

    def add(self, count: int = 1) -> None:
        self._answered += count
        if self._clock() >= self._next and self._answered < self._of:
            self._next = self._clock() + EVERY_S
            _log.info("evaluating", answered=self._answered, of=self._of)
