"""Selects tasks with a judge and a rubric."""

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
    """Tasks that the judge kept, with scores, tasks that it rejected, and tasks without a usable verdict."""

    kept: tuple[ImportedTask, ...]
    rejected: tuple[ImportedTask, ...]
    unjudged: tuple[ImportedTask, ...]


def learn_task_rubric(good: Sequence[str], bad: Sequence[str], endpoint: Endpoint, *, criteria: int = 4) -> Rubric:
    """A rubric that a model writes from good and bad tasks. Raises JudgeError, ValueError."""
    if not good or not bad:
        raise ValueError("a rubric needs good tasks and bad ones")
    count = max(len(good), len(bad))
    pairs = [Example(prompt=_WANTED, good=good[at % len(good)], bad=bad[at % len(bad)]) for at in range(count)]
    return Rubric.generate(pairs, endpoint, criteria=criteria)


def screen_tasks(tasks: Iterable[ImportedTask], judge: Judge, *, least: float = 0.5) -> Screened:
    """Keep tasks with a verdict of at least `least` in [0, 1]. Raises JudgeAway."""
    found: tuple[list[ImportedTask], list[ImportedTask], list[ImportedTask]] = ([], [], [])
    for each in tasks:
        # The task is shown as a reply to a request for one, inside the judge's data marks.
        turns = [f"[{turn['role']}] {turn.get('content')}" for turn in each.messages[:-1]]
        shown = "\n\n".join([*turns, f"[user] {each.question}"]) if turns else each.question
        try:
            verdict = judge.score(
                Reply(text=shown, messages=({"role": "user", "content": _WANTED},), expected=each.answer)
            )
        except JudgeFailed:
            found[2].append(each)
            continue
        judged = with_scores(each, {**verdict.shares, "judge": verdict.normalised})
        found[0 if verdict.normalised >= least else 1].append(judged)
    return Screened(*map(tuple, found))
