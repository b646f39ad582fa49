"""Says that the trainer lives while it is busy: during a long step, a publication, a wait.

Without it the epoch would look dead, and its leases run out, just when most work hangs on them.
"""

import threading
from types import TracebackType
from typing import Self

import structlog

from tuneloop.shared.errors import LedgerError, StaleEpoch
from tuneloop.shared.ledger.training.training import Training
from tuneloop.trainer.stop import Stop

#: Often enough for `tuneloop.shared.ledger.facts.TRAINER_SEEN_S`, and for many beats to fail before a lease runs out.
BEAT_S = 10.0

#: A beat that hangs on a database that is away must not keep a trainer from stopping; it could do no harm any more.
_PATIENCE_S = 5.0

_log = structlog.get_logger()


class Heartbeat:
    """A thread that extends the epoch's leases until the block ends.

    If a newer trainer has taken over, it tells the loop to stop, and `overtaken` says by whom.
    """

    def __init__(self, training: Training, epoch: int, stop: Stop, *, interval_s: float = BEAT_S) -> None:
        self._training, self._epoch, self._stop = training, epoch, stop
        self._interval_s = interval_s
        self._silent = False
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
        """Say once that the trainer lives, as far as the database listens."""
        try:
            self._training.extend(self._epoch)
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
