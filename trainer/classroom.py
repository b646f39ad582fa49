"""The classroom: how the training loop deals with a teacher, which may be away; other methods have none."""

from collections.abc import Callable, Sequence

import structlog

from shared.config import Settings
from shared.experience import Sample
from trainer.endpoint import RemoteTeacher
from trainer.stop import Stop
from trainer.teacher import LocalTeacher, NotTaught, Teacher, TeacherAway

_log = structlog.get_logger()

_AGAIN_S = 3.0


class Classroom:
    """Opens the teacher, if the settings name one. Raises EnvironmentRefused if it cannot teach this model.

    A teacher that does not answer at the start is asked again with the first batch.
    """

    def __init__(self, settings: Settings, stop: Stop, *, again_s: float = _AGAIN_S) -> None:
        self.teacher = _opened(settings, stop)
        self._replies = settings.algorithm.distill.mode == "replies"
        self._stop, self._again_s = stop, again_s
        self._away = False
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
        """What is left of a batch that was not learnt: all of it, after a wait, or what the teacher does not refuse."""
        if isinstance(error, TeacherAway):
            self._miss(error)
            self._stop.wait(self._again_s)
            return list(batch)
        refused = {sample.id for samples in error.refused.values() for sample in samples}
        for reason, samples in error.refused.items():
            drop(samples, reason)
        return [sample for sample in batch if sample.id not in refused]

    def attended(self) -> None:
        """The teacher answered."""
        if self._away:
            self._away = False
            _log.info("teacher_back")

    def _miss(self, error: TeacherAway) -> None:
        if not self._away and not self._stop.is_set():
            _log.warning("teacher_away", reason=str(error))
        self._away = True


def _opened(settings: Settings, stop: Stop) -> Teacher | None:
    distill = settings.algorithm.distill
    if settings.algorithm.algorithm_type != "distill":
        return None
    if distill.teacher_path is not None:
        return LocalTeacher(settings, distill.teacher_path)
    return RemoteTeacher(settings, stop)
