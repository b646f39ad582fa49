"""Says that the trainer lives while it is busy: during a long step, a publication, a wait. And whether it moves.

Without it the epoch would look dead, and its leases run out, just when most work hangs on them.
"""

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from tuneloop.shared.errors import LedgerError, StaleEpoch
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.operations.diagnosis import STILL_S, Code
from tuneloop.trainer.stop import Stop

#: Often enough for `tuneloop.shared.ledger.facts.TRAINER_SEEN_S`, and for many beats to fail before a lease runs out.
BEAT_S = 10.0

#: A beat that hangs on a database that is away must not keep a trainer from stopping; it could do no harm any more.
_PATIENCE_S = 5.0

_CURE = (
    "a disk, a database, a teacher or a worker that does not answer holds it there. Mend that, or kill the trainer and"
    " start it again: nothing is lost"
)

_log = structlog.get_logger()


class WorkWatch:
    """Sees whether the work moves: what runs behind the thread that makes the watch, or else that thread.

    A thread that computes spends processor time, and one that waits for something to come looks for it now and then,
    which the kernel counts as a switch. One that is held by a disk, a pipe or another process does neither.
    """

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._seen: list[str] = []
        self._moved_at = time.monotonic()
        #: The function of ours that is under way.
        self.place = ""

    def look(self) -> float:
        """For how many seconds nothing has moved."""
        known = (self._thread, threading.main_thread())
        behind = [each for each in threading.enumerate() if not each.daemon and each not in known]
        # A thread of a pool that has nothing to do is in no function of ours.
        working = [each for each in behind if place_of(each)] or [self._thread]
        self.place, seen = place_of(working[0]), []
        for thread in working:
            folder = Path(f"/proc/self/task/{thread.native_id}")
            with suppress(OSError):  # it has ended
                seen += [line for line in (folder / "status").read_text().splitlines() if "ctxt_switches" in line]
                seen += (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
        if seen != self._seen:
            self._seen, self._moved_at = seen, time.monotonic()
        return time.monotonic() - self._moved_at


def place_of(thread: threading.Thread) -> str:
    """The function of ours that a thread is in; empty where it is in none."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("tuneloop."):
        frame = frame.f_back
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_name}" if frame is not None else ""


class Heartbeat:
    """A thread that extends the epoch's leases until the block ends, and keeps the alarm about work that stands still.

    If a newer trainer has taken over, it stops the loop, and `overtaken` names that trainer. To be made by the thread
    that trains.
    """

    def __init__(self, ledger: Ledger, epoch: int, stop: Stop, *, interval_s: float = BEAT_S) -> None:
        self._training, self._alarms, self._epoch, self._stop = ledger.training, ledger.alarms, epoch, stop
        self._interval_s = interval_s
        self._silent = False
        self._work, self._is_raised = WorkWatch(), True  # an earlier trainer's alarm may be open
        self._done = threading.Event()
        self.overtaken: StaleEpoch | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(_PATIENCE_S)

    def beat(self) -> None:
        """Say once that the trainer lives, and whether it moves, as far as the database listens."""
        try:
            self._training.extend(self._epoch)
            if (still_s := self._work.look()) < STILL_S:
                if self._is_raised:
                    self._alarms.clear(Code.TRAINER_STUCK)
                self._is_raised = False
            elif not self._is_raised:
                reason = f"the trainer of epoch {self._epoch} has stood still for {still_s:.0f} s in {self._work.place}"
                if self._alarms.raise_alarm(Alarm(Code.TRAINER_STUCK, f"{reason}: {_CURE}")):
                    _log.error("trainer_stuck", reason=reason)
                self._is_raised = True
        except StaleEpoch as error:
            _log.warning("overtaken", reason=str(error))
            self.overtaken = error
            self._done.set()
            self._stop.set()
        except LedgerError as error:  # the next may succeed; what is wrong for good, the loop's own verbs report
            if not self._silent:
                _log.warning("lease_not_extended", reason=str(error))
            self._silent = True
        else:
            self._silent = False

    def _run(self) -> None:
        while not self._done.wait(self._interval_s):
            self.beat()
