"""How the training loop deals with a teacher that does not answer: it waits, retries, and drops what always fails."""

from collections.abc import Callable, Mapping, Sequence

import structlog

from tuneloop.shared.errors import SamplesRefused, TeacherAway
from tuneloop.shared.experience import Sample
from tuneloop.shared.ledger.versions.alarms import Alarm, Alarms
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.stop import Stop
from tuneloop.trainer.teacher.teacher import LocalTeacher, RemoteTeacher, Teacher

_log = structlog.get_logger()

_AWAY = "teacher_away"
_RETRY_S = 3.0

#: A sample is dropped after so many failures in a row of a teacher that answers for other samples.
_MAX_FAILURES = 3

#: So many failed attempts in a row raise an alarm: more than it takes to drop a sample.
_ALARM_AFTER = 10


class TeacherRetries:
    """Creates the teacher, if the settings name one. Raises EnvironmentRefused if it cannot teach this model.

    A teacher that does not answer at the start is checked again with the first batch. Methods without a teacher use
    none of this.

    `_failed_attempts` counts the attempts in a row that labelled no batch, `_failures`, by the id of a sample, those in
    which the teacher answered for others. `_alarm_open` None: the previous trainer may have left the alarm open.
    """

    def __init__(self, settings: Settings, alarms: Alarms, stop: Stop, *, retry_s: float = _RETRY_S) -> None:
        distill = settings.algorithm.distill
        self.teacher: Teacher | None = None
        if settings.algorithm.algorithm_type == "distill" and distill.teacher_path is not None:
            self.teacher = LocalTeacher(settings, distill.teacher_path)
        elif settings.algorithm.algorithm_type == "distill":
            self.teacher = RemoteTeacher(settings, stop)
        self._learns_replies = settings.algorithm.distill.mode == "replies"
        self._alarms, self._stop, self._retry_s = alarms, stop, retry_s
        self._failed_attempts = 0
        self._failures: dict[int, int] = {}
        self._alarm_open: bool | None = None
        if self.teacher is not None:
            try:
                self.teacher.check()
            except TeacherAway as error:
                self._count_failure(error)

    def label(self, batch: list[Sample]) -> list[Sample]:
        """The batch, with the teacher's replies where these are learnt. Raises TeacherAway or SamplesRefused."""
        if self.teacher is None or not self._learns_replies:
            return batch
        return self.teacher.reply(batch)

    def requeue(
        self, batch: Sequence[Sample], error: TeacherAway | SamplesRefused, *, drop: Callable[[list[Sample], str], None]
    ) -> list[Sample]:
        """The samples of a failed batch to try again: all of them, after a wait, or those that are not dropped."""
        if isinstance(error, TeacherAway):
            self._count_failure(error)
            # None is given up on while the teacher answers for no sample at all.
            failed_ids = {number for ids in error.failed.values() for number in ids}
            if failed_ids:
                self._failures = {number: self._failures.get(number, 0) + 1 for number in failed_ids}
            prefix = f"the teacher answers for other samples, but failed {_MAX_FAILURES} times in a row on this one"
            found = {
                f"{prefix}: {reason}": [number for number in ids if self._failures[number] >= _MAX_FAILURES]
                for reason, ids in error.failed.items()
            }
            refused: Mapping[str, Sequence[int]] = {reason: ids for reason, ids in found.items() if ids}
            if not refused:
                self._stop.wait(self._retry_s)
        else:
            refused = error.refused
        for reason, ids in refused.items():
            drop([sample for sample in batch if sample.id in ids], reason)
        dropped = {number for ids in refused.values() for number in ids}
        return [sample for sample in batch if sample.id not in dropped]

    def succeeded(self) -> None:
        """A batch has been trained on: the teacher, if there is one, answered. Raises LedgerUnavailable."""
        if self._alarm_open is not False:
            self._alarms.clear(_AWAY)
            self._alarm_open = False
        if self._failed_attempts:
            _log.info("teacher_back")
        self._failed_attempts = 0
        self._failures.clear()

    def _count_failure(self, error: TeacherAway) -> None:
        if self._stop.is_set():
            return
        if not self._failed_attempts:
            _log.warning("teacher_away", reason=str(error))
        self._failed_attempts += 1
        if self._failed_attempts >= _ALARM_AFTER and not self._alarm_open:
            reason = f"the teacher failed to answer for a batch {self._failed_attempts} times in a row: {error}"
            if self._alarms.raise_alarm(Alarm(name=_AWAY, reason=f"{reason}; training waits for it")):
                _log.error("alarm_raised", alarm=_AWAY, reason=reason)
            self._alarm_open = True
