"""What an evaluation comes to: means over the tasks, of all of them and of each slice. Pure."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from shared.errors import NotEvaluated
from shared.evaluation_tasks import Task

SCORE, LENGTH, REFUSALS, KL = "score", "reply_length", "refusals", "kl"

#: Not a measure: which tasks were asked, as their `fingerprint`. Figures of others cannot be compared.
TASKS = "tasks"

# Of so many replies the judge may have no verdict; with more, there is no evaluation.
_UNJUDGED = 0.1


class Figure(NamedTuple):
    """The mean of a metric over `samples` tasks: all of them, or those of a slice where it has a name."""

    metric: str
    slice: str
    value: float
    deviation: float
    samples: int


class Answered(NamedTuple):
    """A task with the reply to it, the reply's tokens and its score; None: the judge has no verdict on it."""

    task: Task
    reply: str
    tokens: int
    score: float | None


def figures_of(
    answered: Sequence[Answered], *, fingerprint: int, refusals: Iterable[re.Pattern[str]]
) -> tuple[Figure, ...]:
    """The figures of one version. Raises NotEvaluated if too many replies have no verdict."""
    judged = [each for each in answered if each.score is not None]
    if len(answered) - len(judged) > _UNJUDGED * len(answered):
        raise NotEvaluated(f"the judge has no verdict on {len(answered) - len(judged)} of {len(answered)} replies")
    scores: dict[str, list[float]] = defaultdict(list)
    for each in judged:
        for part in ("", *([each.task.slice] if each.task.slice else [])):
            scores[part].append(each.score or 0.0)
    patterns = list(refusals)
    refused = [float(any(pattern.search(each.reply) for pattern in patterns)) for each in answered]
    return (
        Figure(TASKS, "", float(fingerprint), 0.0, len(answered)),
        *(mean(SCORE, values, part) for part, values in sorted(scores.items())),
        mean(LENGTH, [float(each.tokens) for each in answered]),
        mean(REFUSALS, refused),
    )


def mean(metric: str, values: Sequence[float], part: str = "") -> Figure:
    """The figure that the values come to."""
    return Figure(metric, part, fmean(values), pstdev(values), len(values))
