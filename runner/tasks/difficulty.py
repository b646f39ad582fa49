"""Which tasks teach most: those that are solved sometimes, before those that always or never are. Pure.

With p the share of runs that solve a task, a group of runs differs by p(1-p) in the mean: a task that every run solves,
or none, teaches a method of groups nothing.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tuneloop.runner.tasks.task_set import ImportedTask

T = TypeVar("T", ImportedTask, Mapping[str, Any], str)

#: A task by its id, and the outcomes of its runs, the oldest first: True, or 1, where the task was solved.
Outcomes = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDifficulty:
    """What is known of a task: `solved` of `runs`, and by these the mean of p and of p(1-p)."""

    task_id: str
    runs: int
    solved: float
    solve_rate: float
    variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DifficultySelector:
    """Orders tasks by what they teach. The outcomes are those of a model that changes, so only the `newest` count.

    p has a Beta distribution with `prior` (solved and not solved, as if seen before). Of any 1 / `unseen` tasks in
    the order one has never been run, while there are such. What is equal comes in an order by `seed`.
    """

    prior: tuple[float, float] = (1.0, 1.0)
    unseen: float = 0.2
    newest: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for what makes no sense."""
        if min(self.prior) <= 0 or not 0 <= self.unseen <= 1 or self.newest < 1:
            raise ValueError("prior must be above 0, unseen from 0 to 1, newest at least 1")

    def order(self, tasks: Sequence[T], outcomes: Outcomes, *, count: int | None = None) -> list[T]:
        """The tasks, or the first `count`, those that teach most first. A task is its id, or has a `task_id`."""
        shuffled = list(tasks)
        random.Random(self.seed).shuffle(shuffled)
        known = [each for each in shuffled if outcomes.get(_id(each))]
        fresh = [each for each in shuffled if not outcomes.get(_id(each))]
        known.sort(key=lambda each: -self.measure(_id(each), outcomes).variance)
        return list(self._interleave(known, fresh))[:count]

    def measure(self, task_id: str, outcomes: Outcomes) -> TaskDifficulty:
        """What is known of a task. Raises ValueError for an outcome that is not from 0 to 1."""
        runs = list(outcomes.get(task_id, ()))[-self.newest :]
        if wrong := [each for each in runs if not 0 <= each <= 1]:
            raise ValueError(f"{task_id}: an outcome is from 0 (not solved) to 1, not {wrong[0]}")
        solved = float(sum(runs))
        a, b = self.prior[0] + solved, self.prior[1] + len(runs) - solved
        variance = a * b / ((a + b) * (a + b + 1))
        return TaskDifficulty(task_id=task_id, runs=len(runs), solved=solved, solve_rate=a / (a + b), variance=variance)

    def _interleave(self, known: list[T], fresh: list[T]) -> Iterable[T]:
        due = 0.0
        known, fresh = known[::-1], fresh[::-1]
        while known or fresh:
            due += self.unseen
            if fresh and (due >= 1 or not known):
                due = max(0.0, due - 1)
                yield fresh.pop()
            else:
                yield known.pop()


def outcomes_of(rows: Iterable[Mapping[str, Any]], *, success: float = 0.5) -> dict[str, list[float]]:
    """The outcomes by task in rows with a `task_id` and a `total_reward` or `reward`: solved from `success` on.

    Rows are records of runs, or `tuneloop export --format experiences`, where of each run's replies the last counts.
    Rows without a task or a reward say nothing.

    >>> outcomes_of([{"task_id": "t", "run_id": "0", "reward": 1.0}, {"task_id": "t", "run_id": "1", "reward": 0.2}])
    {'t': [1.0, 0.0]}
    """
    runs: dict[str, dict[object, float]] = defaultdict(dict)
    for number, row in enumerate(rows):
        reward, task_id = row.get("total_reward", row.get("reward")), row.get("task_id")
        if task_id is not None and isinstance(reward, int | float) and not isinstance(reward, bool):
            run_id = row.get("run_id")
            runs[str(task_id)][number if run_id is None else str(run_id)] = float(reward >= success)
    return {task_id: list(solved.values()) for task_id, solved in runs.items()}


def _id(task: ImportedTask | Mapping[str, Any] | str) -> str:
    if isinstance(task, str):
        return task
    return task.task_id if isinstance(task, ImportedTask) else str(task["task_id"])
