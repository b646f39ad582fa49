"""What an evaluation comes to: means over the tasks, of all of them and of each slice. Pure."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from tuneloop.shared.errors import NotEvaluated
from tuneloop.shared.evaluation.formats import has_form
from tuneloop.shared.evaluation.tasks import Task, without_reasoning

SCORE, LENGTH, REFUSALS, MALFORMED, KL = "score", "reply_length", "refusals", "malformed", "kl"

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
    """A task with the reply to it, the reply's tokens and its score; None: the judge has no verdict on it.

    `whole`: whether the reply came to its end, and was not cut off at its limit of tokens.
    """

    task: Task
    reply: str
    tokens: int
    score: float | None
    whole: bool = True


def if_of(figures: tuple[Figure, ...], fingerprint: int) -> tuple[Figure, ...]:
    """The figures if they are of the tasks with that fingerprint, else none."""
    asked = next((each.value for each in figures if each.metric == TASKS), None)
    return figures if asked == fingerprint else ()


def figures_of(
    answered: Sequence[Answered], *, fingerprint: int, refusals: Iterable[re.Pattern[str]]
) -> tuple[Figure, ...]:
    """The figures of one version; where nothing was asked, only that. Raises NotEvaluated without enough verdicts."""
    asked = Figure(TASKS, "", float(fingerprint), 0.0, max(1, len(answered)))
    if not answered:
        return (asked,)
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
        asked,
        *(mean(SCORE, values, part) for part, values in sorted(scores.items())),
        mean(LENGTH, [float(each.tokens) for each in answered]),
        mean(REFUSALS, refused),
        *_malformed(answered),
    )


def _malformed(answered: Sequence[Answered]) -> Iterator[Figure]:
    """The share of the replies without the form that is demanded of them, if one is demanded of any."""
    lacking = [
        float(not (each.whole and has_form(form, without_reasoning(each.reply))))
        for each in answered
        if (form := each.task.form) is not None
    ]
    if lacking:
        yield mean(MALFORMED, lacking)


def mean(metric: str, values: Sequence[float], part: str = "") -> Figure:
    """The figure that the values come to."""
    return Figure(metric, part, fmean(values), pstdev(values), len(values))
