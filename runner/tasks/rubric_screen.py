"""A judge's choice among tasks, by a rubric that may be learnt from a few good and bad ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuneloop.runner.errors import JudgeFailed
from tuneloop.runner.judging.endpoint import Endpoint
from tuneloop.runner.judging.judge import Judge
from tuneloop.runner.judging.rubric import Example, Rubric
from tuneloop.runner.rewards.reply import Reply
from tuneloop.runner.tasks.task_set import ImportedTask, with_scores

_WANTED = "Show a request of a user that an assistant should be trained on."


@dataclass(frozen=True, slots=True)
class Screened:
    """What the judge kept, with its scores, what it did not, and how many it gave no usable verdict on."""

    kept: tuple[ImportedTask, ...]
    rejected: tuple[ImportedTask, ...]
    unjudged: tuple[ImportedTask, ...]


def learn_task_rubric(good: Sequence[str], bad: Sequence[str], endpoint: Endpoint, *, criteria: int = 4) -> Rubric:
    """Criteria that a model has written from a few tasks worth training on and a few that are not.

    Read them before you use them. Raises JudgeError, and ValueError where there is none of either.
    """
    if not good or not bad:
        raise ValueError("a rubric needs good tasks and bad ones")
    count = max(len(good), len(bad))
    pairs = [Example(prompt=_WANTED, good=good[at % len(good)], bad=bad[at % len(bad)]) for at in range(count)]
    return Rubric.generate(pairs, endpoint, criteria=criteria)


def screen_tasks(tasks: Iterable[ImportedTask], judge: Judge, *, least: float = 0.5) -> Screened:
    """The tasks that a judge gives `least` or more, of 0 to 1, by its criteria; each criterion's score is kept.

    One without a usable verdict is not kept. Raises JudgeAway where the judge is not there.
    """
    found: tuple[list[ImportedTask], list[ImportedTask], list[ImportedTask]] = ([], [], [])
    for each in tasks:
        try:
            verdict = judge.score(_show(each))
        except JudgeFailed:
            found[2].append(each)
            continue
        judged = with_scores(each, {**verdict.shares, "judge": verdict.normalised})
        found[0 if verdict.normalised >= least else 1].append(judged)
    return Screened(*map(tuple, found))


def _show(task: ImportedTask) -> Reply:
    """A task as a reply to the wish for one: so the judge's marks stand around it."""
    before = "\n\n".join(f"[{each['role']}] {each.get('content')}" for each in task.messages[:-1])
    shown = f"{before}\n\n[user] {task.question}" if before else task.question
    return Reply(text=shown, messages=({"role": "user", "content": _WANTED},), expected=task.answer)
