"""Steps whose loss or gradient is not finite: one is skipped, many in a row end the training."""

import structlog

from tuneloop.shared.ledger.versions.alarms import Alarm, Alarms
from tuneloop.shared.settings.settings import Settings

_log = structlog.get_logger()

NOT_FINITE = "steps_not_finite"


class FiniteSteps:
    """Counts the steps in a row that were not finite, the last after `_skipped_after`; `_sound`: if one was."""

    def __init__(self, settings: Settings, alarms: Alarms) -> None:
        self._alarms, self._most = alarms, settings.algorithm.max_skipped_steps
        self._skipped, self._skipped_after, self._why_skipped = 0, 0, ""
        self._sound = False

    @property
    def too_few(self) -> bool:
        """Whether nothing more is to be learnt."""
        return self._skipped >= self._most

    def note_failure(self, reason: str, *, after: int) -> None:
        """The step after `after` was not finite."""
        self._skipped, self._skipped_after, self._why_skipped = self._skipped + 1, after, reason

    def note_success(self, step: int) -> None:
        """This step was finite, and is not one made again from before the last that was not."""
        if step > self._skipped_after and (self._skipped or not self._sound):
            self._alarms.clear(NOT_FINITE)
            self._skipped, self._sound = 0, True

    def alarm(self, *, step: int, version: int) -> None:
        """So many steps in a row that were not finite are no accident: nothing more is learnt or published.

        The explorer goes on serving what it serves, and no further row is spent on it; a restart tries again.
        """
        reason = f"{self._skipped} steps in a row were not finite, the last because {self._why_skipped}"
        if self._alarms.raise_alarm(Alarm(name=NOT_FINITE, reason=f"{reason}; training has stopped", step=step)):
            _log.error("training_stopped", reason=reason, version=version)
