"""What can go wrong with a run, counted by kind; the first traceback of each kind is shown once."""

import traceback
from collections import Counter
from collections.abc import Callable
from enum import StrEnum


class FailureKind(StrEnum):
    """Why a run gave nothing to learn from."""

    WORKFLOW_RAISED = "workflow raised"
    WORKFLOW_HUNG = "workflow hung"
    NO_REWARD = "no reward"
    BAD_REWARD = "reward is not a number"
    NO_CALL = "called no model"
    OTHER_MODEL = "called another model"
    JUDGE_RAISED = "judge raised"
    JUDGE_HUNG = "judge hung"
    SERVICE_AWAY = "service away"


class RunFailed(Exception):
    """A run failed: of which kind, and in a sentence how. `again`: another attempt may go better."""

    def __init__(self, kind: FailureKind, sentence: str, *, again: bool = False) -> None:
        super().__init__(sentence)
        self.kind, self.again = kind, again


def sentence_of(error: BaseException) -> str:
    """The error's type and what it says, whatever its `__str__` does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - users' classes raise anything
        return f"{type(error).__name__}, whose text cannot be had"


class FailureLog:
    """Counts failures by kind, and says the first of each kind whole."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.counts: Counter[str] = Counter()

    def add(self, error: RunFailed, *, where: str) -> None:
        """Count a failure; the first of its kind is said, with the traceback of what caused it."""
        self.counts[error.kind.value] += 1
        if self.counts[error.kind.value] > 1:
            return
        cause = error.__cause__
        trace = "".join(traceback.format_exception(cause)) if cause is not None else ""
        self._say(f"{error.kind.value}, {where}: {error} (said once; further ones are counted)\n{trace}".rstrip())

    def sentence(self) -> str:
        """All counts, as a person reads them; empty if nothing failed."""
        return ", ".join(f"{count} x {kind}" for kind, count in self.counts.most_common())
