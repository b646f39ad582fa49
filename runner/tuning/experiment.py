"""Keeps an experiment: its folder, the tasks of each step, and the journal from which a process resumes."""

import asyncio
import hashlib
import json
import math
import os
import random
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, Self

from tuneloop.runner.errors import TuneFailed, TuneRefused
from tuneloop.runner.outbox import lock
from tuneloop.runner.private_files import make_private_folder, private_opener

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,80}")
_STAMP = re.compile(r"-\d{14}$")


@dataclass(frozen=True, slots=True)
class ExperimentFolder:
    path: Path

    @classmethod
    def open(cls, root: Path, project: str, experiment: str, *, resume: bool) -> Self:
        """A new folder, or with `resume` the newest of that name. Raises TuneRefused."""
        for what, name in (("project_name", project), ("experiment_name", experiment)):
            if not _NAME.fullmatch(name):
                raise TuneRefused(f"{what} is {name!r}: letters, digits, '.', '_' and '-' make a folder's name")
        parent = root.absolute() / project
        if resume:
            named = [each for each in parent.glob(f"{experiment}-*") if _STAMP.search(each.name)]
            found = [each for each in named if _STAMP.sub("", each.name) == experiment and cls(each).journal.exists()]
            if found:
                return cls(max(found, key=lambda each: each.name))
        for moment in range(60):
            path = parent / f"{experiment}-{time.strftime('%Y%m%d%H%M%S', time.localtime(time.time() + moment))}"
            try:
                make_private_folder(path)
                return cls(path)
            except FileExistsError:
                continue
            except OSError as error:
                raise TuneRefused(f"checkpoint_root_dir: {path} cannot be made: {error.strerror}") from None
        raise TuneRefused(f"{parent} has a folder of that name for each second of the next minute")

    @property
    def name(self) -> str:
        """The folder's name with its start time; the service's `name`."""
        return self.path.name

    @property
    def journal(self) -> Path:
        return self.path / "tune" / "journal.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "monitor" / "tensorboard"

    def settings(self, model: str) -> Path:
        return self.path / "tune" / f"{model}.yaml"

    def log(self, model: str) -> Path:
        return self.path / "tune" / f"{model}.log"


Task = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """The tasks of each step: `batch_size` tasks, each run `group_size` times, over `epochs`.

    `steps` None: as many as the epochs have; the last step may be smaller. `independent`: each step draws its own
    tasks.
    """

    name: str
    tasks: Sequence[Task]
    evaluation: Sequence[Task] = ()
    batch_size: int = 32
    group_size: int = 8
    epochs: int = 1
    steps: int | None = None
    shuffle: bool = False
    independent: bool = False
    seed: int = 0

    @property
    def total_steps(self) -> int:
        whole = math.ceil(len(self.tasks) * self.epochs / self.batch_size)
        return whole if self.steps is None else self.steps

    def positions(self, step: int) -> range:
        """Positions of a step's tasks; steps count from 0."""
        first = step * self.batch_size
        end = first + self.batch_size
        return range(first, end if self.steps is not None else min(end, len(self.tasks) * self.epochs))

    def task(self, position: int) -> Task:
        if self.independent:
            step, place = divmod(position, self.batch_size)
            return self.tasks[_order(len(self.tasks), self.seed, step)[place % len(self.tasks)]]
        epoch, place = divmod(position, len(self.tasks))
        return self.tasks[_order(len(self.tasks), self.seed, epoch)[place] if self.shuffle else place]

    def task_id(self, position: int) -> str:
        """The id of this visit to the task, in the services."""
        return f"{self.name}:{position}"

    def fingerprint(self) -> str:
        """A digest of what a resumed experiment may not change."""
        what = [self.batch_size, self.group_size, self.shuffle, self.seed, [dict(task) for task in self.tasks]]
        what += ["independent"] * self.independent
        return hashlib.sha256(json.dumps(what, default=_stable_words, sort_keys=True).encode()).hexdigest()


def _stable_words(value: object) -> str:
    """A text for an object that JSON lacks, equal in every process (no addresses)."""
    if isinstance(value, set | frozenset):
        return repr(sorted(map(_stable_words, value)))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def tasks_of(dataset: Any, name: str) -> Sequence[Task]:
    """Tasks of a list or a DatasetConfig; none of None. Raises TuneRefused otherwise."""
    if dataset is None:
        return ()
    if hasattr(dataset, "tasks"):
        tasks = list(dataset.tasks())
    elif isinstance(dataset, str | os.PathLike | Mapping) or not isinstance(dataset, Iterable):
        raise TuneRefused(f"{name} must be a list of tasks, or a DatasetConfig, which reads a file, not {dataset!r}")
    else:
        tasks = list(dataset)
    for number, task in enumerate(tasks):
        if not isinstance(task, Mapping):
            raise TuneRefused(f"{name}: task {number} is {type(task).__name__}, not a mapping of fields")
    return tasks


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run. `rewards` are by model; without any the run failed, and `failure` names the kind.

    `position` counts tasks over all steps from 0, `member` the runs of a task, `tokens` those of the replies.
    """

    step: int
    position: int
    member: int
    task_id: str
    run_id: str
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    tokens: int = 0

    @property
    def reward(self) -> float | None:
        """The mean over the models."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else None


@dataclass(slots=True)
class JournalState:
    """The journal's content; `committed` counts tasks by step, `committing` has models' versions before a commit."""

    header: dict[str, Any] | None = None
    lives: int = 0
    results: dict[tuple[int, int], RunResult] = field(default_factory=dict)
    unacknowledged: dict[str, RunResult] = field(default_factory=dict)
    committing: dict[int, dict[str, dict[str, int]]] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    def apply(self, line: Mapping[str, Any]) -> None:
        match line["event"]:
            case "begin":
                self.header, self.lives, self.ended = dict(line), self.lives + 1, False
            case "result":
                result = RunResult(**{name: value for name, value in line.items() if name != "event"})
                self.results[result.position, result.member] = result
                if result.rewards:
                    self.unacknowledged[name_of(result)] = result
            case "acknowledged":
                for name in line["runs"]:
                    self.unacknowledged.pop(name, None)
            case "committing":
                self.committing[line["step"]] = line["before"]
                self.steps.pop(line["step"], None)
            case "committed":
                self.committed[line["step"]] = line["tasks"]
            case "step":
                self.steps[line["step"]] = dict(line)
                self.committing.pop(line["step"], None)
            case "evaluated":
                self.evaluations.append(dict(line))
            case "end":
                self.ended = True

    def first_step(self, plan: TaskPlan) -> int:
        """The first step that is not committed, or the number of steps."""
        steps = range(plan.total_steps)
        # A call with fewer epochs may have committed fewer tasks of its last step.
        return next((at for at in steps if self.committed.get(at, -1) < len(plan.positions(at))), len(steps))

    def results_of(self, step: int) -> list[RunResult]:
        return [result for result in self.results.values() if result.step == step]


class Journal:
    """The open journal: each appended line is on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        make_private_folder(path.parent, exist_ok=True)
        self.path = path
        self.state = JournalState()
        self._file = FileIO(path, "ab", opener=private_opener)
        try:
            if not lock(self._file.fileno()):
                raise TuneRefused(f"{path} is in use: another call of tune() runs this experiment")
            with path.open("rb+") as file:  # drops a line that a crash cut off
                file.truncate(file.read().rfind(b"\n") + 1)
            for number, line in enumerate(path.read_text("utf-8").split("\n")[:-1], start=1):
                try:
                    self.state.apply(json.loads(line))
                except ValueError:
                    raise TuneRefused(f"{path}, line {number} is damaged: this experiment cannot be resumed") from None
        except BaseException:
            self._file.close()
            raise
        self._turn = asyncio.Lock()

    def close(self) -> None:
        self._file.close()

    async def append(self, *lines: Mapping[str, Any]) -> None:
        """Write and sync lines, then apply them to `state`."""
        written = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
        async with self._turn:
            await asyncio.to_thread(self._write, written.encode())
        for line in lines:
            self.state.apply(line)

    def _write(self, written: bytes) -> None:
        """Raises TuneFailed and leaves the file unchanged."""
        descriptor = self._file.fileno()
        end = os.fstat(descriptor).st_size
        try:
            if (count := self._file.write(written) or 0) < len(written):
                raise OSError(f"only {count} of {len(written)} bytes could be written")
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, end)
            raise TuneFailed(f"{self.path} cannot be written: {error}") from error


def name_of(result: RunResult) -> str:
    """The run's name in the service and the journal."""
    return f"{result.task_id}/{result.run_id}"


def result_line(result: RunResult) -> dict[str, Any]:
    return {"event": "result", **asdict(result)}


def acknowledged_line(results: Iterable[RunResult]) -> dict[str, Any]:
    return {"event": "acknowledged", "runs": [name_of(result) for result in results]}
