"""The journal of an experiment: what was rewarded, acknowledged and committed, so that another process can go on.

A file of lines of JSON that only grows. A line counts once it is on disk; a last line without its end is a write that
was cut off, and is removed when the file is opened again.
"""

import asyncio
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import TuneFailed, TuneRefused
from tuneloop.runner.feedback.segments import lock
from tuneloop.runner.private_files import make_private_folder, private_opener


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. `rewards` are by model; without any it failed, as `failure` says, and is not trained on.

    `position` counts the tasks of all steps from 0, `member` the runs of a task. `tokens` are those of its replies, as
    far as its models counted them.
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
        """The mean over the models; None if it failed."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else None


@dataclass(slots=True)
class JournalState:
    """What a journal says: the runs by position and member, and what became of them.

    `committed` has how many tasks a step had, if the line says so; `committing`, by model, the versions before that.
    """

    header: dict[str, Any] | None = None
    lives: int = 0
    results: dict[tuple[int, int], RunResult] = field(default_factory=dict)
    unacknowledged: dict[str, RunResult] = field(default_factory=dict)
    committing: dict[int, dict[str, dict[str, int]]] = field(default_factory=dict)
    committed: dict[int, int | None] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    def apply(self, line: Mapping[str, Any]) -> None:
        """Take a line into account."""
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
            case "committing" | "committed" | "step":
                self._apply_to_step(line["step"], line)
            case "evaluated":
                self.evaluations.append(dict(line))
            case "end":
                self.ended = True

    def _apply_to_step(self, step: int, line: Mapping[str, Any]) -> None:
        match line["event"]:
            case "committing":
                self.committing[step] = line["before"]
                self.steps.pop(step, None)
            case "committed":
                self.committed[step] = line.get("tasks")
            case "step":
                self.steps[step] = dict(line)
                self.committing.pop(step, None)

    def is_committed(self, step: int, tasks: int) -> bool:
        """Whether all of a step is, which has so many tasks: the last one of fewer epochs may have had fewer."""
        if step not in self.committed:
            return False
        known = self.committed[step]
        return known is None or known >= tasks

    def results_of(self, step: int) -> list[RunResult]:
        """The runs of a step that have ended, however they did."""
        return [result for result in self.results.values() if result.step == step]


class Journal:
    """The open journal: appends lines, each on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        make_private_folder(path.parent, exist_ok=True)
        self.path = path
        self.state = JournalState()
        self._file = FileIO(path, "ab", opener=private_opener)
        try:
            if not lock(self._file.fileno()):
                raise TuneRefused(f"{path} is in use: another call of tune() goes on with this experiment")
            _cut_off_unfinished(path)
            for line in _lines(path):
                self.state.apply(line)
        except BaseException:
            self._file.close()
            raise
        self._turn = asyncio.Lock()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    async def append(self, *lines: Mapping[str, Any]) -> None:
        """Bring lines to disk, in one write, and into `history`."""
        written = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
        async with self._turn:
            await asyncio.to_thread(self._write, written.encode())
        for line in lines:
            self.state.apply(line)

    def _write(self, written: bytes) -> None:
        """Raises TuneFailed; then nothing of it is in the file."""
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
    """The run, as the service and the journal name it."""
    return f"{result.task_id}/{result.run_id}"


def result_line(result: RunResult) -> dict[str, Any]:
    """The line that says how a run ended."""
    return {"event": "result", **asdict(result)}


def acknowledged_line(results: Iterable[RunResult]) -> dict[str, Any]:
    """The line that says that the services have these rewards."""
    return {"event": "acknowledged", "runs": [name_of(result) for result in results]}


def _cut_off_unfinished(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_text("utf-8").split("\n")[:-1], start=1):
        try:
            yield json.loads(line)
        except ValueError:
            raise TuneRefused(f"{path}, line {number} is damaged: this experiment cannot be resumed") from None
