"""Which tasks a step is made of: the same in every process that goes on with an experiment."""

import hashlib
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tuneloop.runner.errors import TuneRefused

Task = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """`batch_size` tasks make a step, each run `group_size` times; the tasks are gone through `epochs` times.

    `steps` None: as many as the epochs have; the last step may be smaller, so that no task is left out.
    """

    name: str
    tasks: Sequence[Task]
    evaluation: Sequence[Task] = ()
    batch_size: int = 32
    group_size: int = 8
    epochs: int = 1
    steps: int | None = None
    shuffle: bool = False
    seed: int = 0

    @property
    def total_steps(self) -> int:
        """How many steps there are."""
        whole = math.ceil(len(self.tasks) * self.epochs / self.batch_size)
        return whole if self.steps is None else self.steps

    def positions(self, step: int) -> range:
        """The positions of a step's tasks; steps count from 0."""
        first = step * self.batch_size
        end = first + self.batch_size
        return range(first, end if self.steps is not None else min(end, len(self.tasks) * self.epochs))

    def task(self, position: int) -> Task:
        """The task at a position."""
        epoch, place = divmod(position, len(self.tasks))
        return self.tasks[_order(len(self.tasks), self.seed, epoch)[place] if self.shuffle else place]

    def task_id(self, position: int) -> str:
        """The name under which the services know this visit to the task."""
        return f"{self.name}:{position}"

    def fingerprint(self) -> str:
        """A digest of all that a resumed experiment must have in common with what it goes on with."""
        what = [self.batch_size, self.group_size, self.shuffle, self.seed, [dict(task) for task in self.tasks]]
        return hashlib.sha256(json.dumps(what, default=_stable_words, sort_keys=True).encode()).hexdigest()


def _stable_words(value: object) -> str:
    """What stands for an object that JSON does not have: the same in every process, unlike addresses."""
    if isinstance(value, set | frozenset):
        return repr(sorted(map(_stable_words, value)))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def require_tasks(tasks: Sequence[Task], what: str) -> None:
    """Raise TuneRefused if there are none, or one is not a mapping."""
    if not tasks:
        raise TuneRefused(f"{what} is empty: there is nothing to run")
    for number, task in enumerate(tasks):
        if not isinstance(task, Mapping):
            raise TuneRefused(f"{what}: task {number} is {type(task).__name__}, not a mapping of fields")


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
