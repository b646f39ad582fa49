"""Every error that tuneloop raises on purpose."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

#: The most characters of an answer about a client's request, which may quote any words of it.
_MOST_TOLD = 2000


class TuneloopError(Exception):
    """The root of the tree: catch it to catch all of ours."""


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class StartupError(TuneloopError):
    exit_code = 3


class SettingsError(StartupError):
    """The settings are wrong; the message lists every mistake, one a line."""

    exit_code = 2


class EnvironmentRefused(StartupError):
    """The settings are fine, but the machine does not allow what they ask."""


class DatabaseAway(EnvironmentRefused):
    """The database cannot be reached, or does not let us in; that may pass."""


class RequestRefused(TuneloopError):
    """A request that gets a 4xx or 503 answer: `status` in HTTP, `code` and `param` in OpenAI's error envelope.

    `extra` goes into the top level of the body, `retry_after_s` into Retry-After. A message or `param` beyond 2000
    characters loses its middle.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        extra: dict[str, object] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(_shorten(message))
        self.status = status
        self.code = code
        self.param = None if param is None else _shorten(param)
        self.extra = extra or {}
        self.retry_after_s = retry_after_s


def _shorten(words: str) -> str:
    if len(words) <= _MOST_TOLD:
        return words
    return f"{words[: _MOST_TOLD // 2]} [...] {words[-_MOST_TOLD // 2 :]}"


class KeyRefused(TuneloopError):
    """A key that cannot be made as it was asked for; the message begins with the field that is wrong."""


class PolicyRefused(TuneloopError):
    """What is asked of a policy cannot be done; the message says why."""


class JobRefused(TuneloopError):
    """What is asked of a fine-tuning job cannot be done; the message says why."""


class FileRefused(TuneloopError):
    """A file cannot be read or written; the message lists its mistakes, one a line."""


class StorageFull(TuneloopError):
    """A record cannot be kept: the outbox has reached its bound, or its disk refuses it."""


class EngineError(TuneloopError):
    """An engine answered wrongly or not at all."""


class EngineUnreachable(EngineError):
    """An engine's connection failed or ended before anything was answered."""


class ChannelLost(TuneloopError):
    """The other process, worker or control process, is gone or does not answer."""


class LedgerError(TuneloopError):
    """The ledger refused a step."""


class StaleEpoch(LedgerError):
    exit_code = 4


class LeaseLost(LedgerError):
    """Rows that a version was trained on are leased no more."""


class ParentEnded(LedgerError):
    """The version that the next one was trained on is not the one to go on from any more."""


class VersionRefused(LedgerError):
    """A version cannot be promoted, rolled back or pinned as asked; nothing has changed."""


class UnknownRater(LedgerError):
    """A rater is named who has given no feedback; nothing has changed."""


class RecordRefused(LedgerError):
    """The database will never take what a record holds: a value that has no column's type, or breaks a CHECK."""


class LedgerUnavailable(LedgerError):
    """The database cannot be reached at the moment."""


class LedgerForbidden(LedgerUnavailable):
    """The database answers, but does not let us do it: a right, a table or its disk is missing until a person acts."""


class RecordsLost(TuneloopError):
    """The ledger has fewer records of a file than were taken of it: it was put back, or a standby lagged."""


class Deadlock(LedgerUnavailable):
    """The database ended one of two transactions that waited for each other: it has changed nothing."""


class CheckpointRejected(TuneloopError):
    """A checkpoint that must not be served; the message is the reason."""


class CheckpointUnreadable(CheckpointRejected):
    """A checkpoint whose files cannot be read from this machine, which says nothing about the checkpoint."""


class DiskFull(TuneloopError):
    """A checkpoint does not fit on the disk at the moment; nothing of it is left there. The message is the reason."""


class NotEvaluated(TuneloopError):
    """A version cannot be evaluated at the moment, for a reason that has nothing to do with the version."""


class NotFinite(TuneloopError):
    """A loss or gradient was not finite; the learner is as it was before the step."""


class RankFailed(TuneloopError):
    """Another rank of the trainer has failed, in a way of its own."""


class RankOutOfMemory(RankFailed):
    """A rank ran out of memory in mid-pass, where others wait for its part: all start again, with less at once."""


class TeacherAway(TuneloopError):
    """The teacher does not answer; a retry may succeed. `failed`: sample ids without an answer, by reason."""

    def __init__(self, reason: str, failed: Mapping[str, Sequence[int]] = MappingProxyType({})) -> None:
        super().__init__(reason)
        self.failed = failed


class SamplesRefused(TuneloopError):
    """The teacher will never answer for some samples, or memory has no room: `refused` are their ids, by the reason."""

    def __init__(self, refused: Mapping[str, Sequence[int]]) -> None:
        super().__init__("; ".join(refused))
        self.refused = refused
