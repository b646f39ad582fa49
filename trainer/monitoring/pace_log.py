"""Notes how fast the trainer is, and bounds what waits for it, whenever a version was registered."""

import structlog

from tuneloop.shared import steady_time
from tuneloop.shared.capacity.pace import VersionPace, note_version
from tuneloop.shared.ledger.ledger import BatchPolicy, Ledger
from tuneloop.shared.settings.settings import Settings

_log = structlog.get_logger()


class PaceLog:
    """The seconds of the steps since the last version."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings, self._ledger = settings, ledger
        self._policy = BatchPolicy.of(settings)
        self._step_s = 0.0
        self._lags = False

    def add_step(self, seconds: float) -> None:
        """A step was made."""
        self._step_s += seconds

    def end_version(self, epoch: int, consumed: int, *, publish_s: float) -> None:
        """A version of so many experiences was registered."""
        backlog = self._ledger.training.trim(epoch, self._policy)
        if backlog.set_aside and not self._lags:
            _log.warning("trainer_lags", set_aside=backlog.set_aside, waiting=backlog.waiting)
        self._lags = backlog.set_aside > 0
        version = VersionPace(
            at=steady_time.now(),
            consumed=consumed,
            waiting=backlog.waiting,
            set_aside=backlog.set_aside,
            step_s=self._step_s,
            publish_s=publish_s,
        )
        self._step_s = 0.0
        try:
            note_version(self._settings.job_dir, version)
        except OSError as error:  # The next one is noted, too.
            _log.warning("pace_not_written", reason=str(error))
