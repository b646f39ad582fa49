"""The classroom: how the training loop deals with a teacher, which may be away; other methods have none."""

from collections.abc import Callable, Mapping, Sequence

import structlog

from tuneloop.shared.experience import Sample
from tuneloop.shared.ledger.versions.alarms import Alarm, Alarms
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.stop import Stop
from tuneloop.trainer.teacher.endpoint import RemoteTeacher
from tuneloop.trainer.teacher.teacher import LocalTeacher, NotTaught, Teacher, TeacherAway

_log = structlog.get_logger()

_AWAY = "teacher_away"
_AGAIN_S = 3.0

#: So often in a row a teacher that answers others may fail on a row before it is dropped.
_MOST_FAILURES = 3

#: So many tries in a row that brought no batch are an alarm: more than a row needs to be dropped.
_ALARMING = 10


class Classroom:
    """Opens the teacher, if the settings name one. Raises EnvironmentRefused if it cannot teach this model.

    A teacher that does not answer at the start is asked again with the first batch.

    `_missed` counts the tries in a row that brought no batch, `_failures` those in which a sample was not answered and
    others were. `_alarmed`: whether the alarm is open; None: the trainer before this one may have left it so.
    """

    def __init__(self, settings: Settings, alarms: Alarms, stop: Stop, *, again_s: float = _AGAIN_S) -> None:
        self.teacher = _opened(settings, stop)
        self._replies = settings.algorithm.distill.mode == "replies"
        self._alarms, self._stop, self._again_s = alarms, stop, again_s
        self._missed = 0
        self._failures: dict[int, int] = {}
        self._alarmed: bool | None = None
        if self.teacher is not None:
            try:
                self.teacher.check()
            except TeacherAway as error:
                self._miss(error)

    def taught(self, batch: list[Sample]) -> list[Sample]:
        """The batch, with the teacher's replies if these are learnt. Raises TeacherAway or NotTaught."""
        if self.teacher is None or not self._replies:
            return batch
        return self.teacher.reply(batch)

    def dismissed(
        self, batch: Sequence[Sample], error: TeacherAway | NotTaught, *, drop: Callable[[list[Sample], str], None]
    ) -> list[Sample]:
        """What is left of a batch that was not learnt: all of it, after a wait, or what the teacher may yet answer."""
        if isinstance(error, TeacherAway):
            self._miss(error)
            refused = self._given_up(error.failed)
            if not refused:
                self._stop.wait(self._again_s)
        else:
            refused = error.refused
        for reason, samples in refused.items():
            drop(samples, reason)
        gone = {sample.id for samples in refused.values() for sample in samples}
        return [sample for sample in batch if sample.id not in gone]

    def attended(self) -> None:
        """A batch has been learnt: the teacher, if there is one, answered. Raises LedgerUnavailable."""
        if self._alarmed is not False:
            self._alarms.clear(_AWAY)
            self._alarmed = False
        if self._missed:
            _log.info("teacher_back")
        self._missed = 0
        self._failures.clear()

    def _miss(self, error: TeacherAway) -> None:
        if self._stop.is_set():
            return
        if not self._missed:
            _log.warning("teacher_away", reason=str(error))
        self._missed += 1
        if self._missed >= _ALARMING and not self._alarmed:
            reason = f"the teacher was asked {self._missed} times and has not answered for a batch: {error}"
            if self._alarms.raise_alarm(Alarm(name=_AWAY, reason=f"{reason}; training waits for it")):
                _log.error("alarm_raised", alarm=_AWAY, reason=reason)
            self._alarmed = True

    def _given_up(self, failed: Mapping[str, list[Sample]]) -> dict[str, list[Sample]]:
        """The samples that the teacher will never answer, it seems. While it answers none, it is to blame, not they."""
        if not failed:
            return {}
        of_any = [sample.id for samples in failed.values() for sample in samples]
        self._failures = {number: self._failures.get(number, 0) + 1 for number in of_any}
        hopeless = {reason: [each for each in samples if self._hopeless(each)] for reason, samples in failed.items()}
        told = f"the teacher answers others, but failed {_MOST_FAILURES} times in a row on this"
        return {f"{told}: {reason}": samples for reason, samples in hopeless.items() if samples}

    def _hopeless(self, sample: Sample) -> bool:
        return self._failures[sample.id] >= _MOST_FAILURES


def _opened(settings: Settings, stop: Stop) -> Teacher | None:
    distill = settings.algorithm.distill
    if settings.algorithm.algorithm_type != "distill":
        return None
    if distill.teacher_path is not None:
        return LocalTeacher(settings, distill.teacher_path)
    return RemoteTeacher(settings, stop)
