"""Extends the epoch's leases, which a busy trainer would lose, and detects work that stands still."""

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import structlog

from tuneloop.shared.errors import LedgerError, StaleEpoch
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.operations.diagnosis import STILL_S, Code
from tuneloop.trainer.stop import Stop

#: Within `tuneloop.shared.ledger.facts.TRAINER_SEEN_S`, with room for many failed beats before a lease expires.
BEAT_S = 10.0

_PATIENCE_S = 5.0  # longest wait for a beat at exit, which a missing database may block

_CURE = (
    "a disk, a database, a teacher or a worker does not answer. Repair it, or kill the trainer and"
    " restart it: nothing is lost"
)

_log = structlog.get_logger()


class WorkWatch:
    """Detects progress of the threads that work, or otherwise of the thread that creates the watch.

    A computing thread uses processor time, and one that polls has context switches. A thread blocked on a disk, a pipe
    or another process has neither.
    """

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._seen: list[str] = []
        self._moved_at = time.monotonic()
        self.place = ""  # our function that is running

    def look(self) -> float:
        """Seconds without progress."""
        known = (self._thread, threading.main_thread())
        behind = [each for each in threading.enumerate() if not each.daemon and each not in known]
        # An idle pool thread is in no function of ours.
        working = [each for each in behind if place_of(each)] or [self._thread]
        self.place, seen = place_of(working[0]), []
        for thread in working:
            folder = Path(f"/proc/self/task/{thread.native_id}")
            with suppress(OSError):  # the thread has ended
                seen += [line for line in (folder / "status").read_text().splitlines() if "ctxt_switches" in line]
                seen += (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
        if seen != self._seen:
            self._seen, self._moved_at = seen, time.monotonic()
        return time.monotonic() - self._moved_at


def place_of(thread: threading.Thread) -> str:
    """The function of ours that a thread runs, or ""."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("tuneloop."):
        frame = frame.f_back
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_name}" if frame is not None else ""


class Heartbeat:
    """Extends the epoch's leases in a thread until the block ends, and raises an alarm for work that stands still.

    If a newer trainer has taken over, stops the loop and sets `overtaken`. Create it in the training thread.
    """

    def __init__(self, ledger: Ledger, epoch: int, stop: Stop, *, interval_s: float = BEAT_S) -> None:
        self._training, self._alarms, self._epoch, self._stop = ledger.training, ledger.alarms, epoch, stop
        self._interval_s = interval_s
        self._silent = False
        self._work, self._is_raised = WorkWatch(), True  # an earlier trainer may have raised the alarm
        self._done = threading.Event()
        self.overtaken: StaleEpoch | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join(_PATIENCE_S)

    def beat(self) -> None:
        """Extend the leases once, and check progress; without a database, only log."""
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
        except LedgerError as error:  # the next may succeed; the loop reports lasting errors
            if not self._silent:
                _log.warning("lease_not_extended", reason=str(error))
            self._silent = True
        else:
            self._silent = False

    def _run(self) -> None:
        while not self._done.wait(self._interval_s):
            self.beat()
