"""The classroom: a teacher that is away is waited for, and rows that it can never answer are not."""

from collections.abc import Iterator
from threading import Event

import numpy as np
import pytest

from tests.doubles.teacher import TeacherDouble, teaching
from tests.trainer.factories import commit, sample
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchPolicy
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.trainer.batches.sequences import TokenSequence
from tuneloop.trainer.loop import run
from tuneloop.trainer.teacher.endpoint import RemoteTeacher
from tuneloop.trainer.teacher.retries import Classroom
from tuneloop.trainer.teacher.teacher import NotTaught, TeacherAway

POISON = 255


@pytest.fixture
def double(base) -> Iterator[TeacherDouble]:
    with teaching(base) as teacher:
        yield teacher


@pytest.fixture
def classroom(double, settings, ledger):
    """Makes one with a teacher, and a trainer, of little patience."""

    def make(mode="reverse_kl"):
        stop = Event()
        distill = {"teacher_url": double.url, "teacher_model": "big", "mode": mode, "timeout": 0.5}
        chosen = settings(algorithm={"algorithm_type": "distill", "distill": distill}, model={"max_response_tokens": 9})
        made = Classroom(chosen, ledger.alarms, stop, again_s=0.01)
        made.teacher = RemoteTeacher(chosen, stop, pauses_s=(0.01,))
        return made

    return make


def _poison(number):
    return sample(number, prompt_ids=np.array([POISON, 3], np.int32))


class Lesson:
    """What the loop does with a batch; `dropped` are ids by the reason."""

    def __init__(self, classroom, batch):
        self._classroom = classroom
        self.batch, self.dropped = batch, {}

    def tried(self):
        """Whether it was learnt."""
        try:
            taught = self._classroom.taught(self.batch)
            self._classroom.teacher.score([TokenSequence.alone(each) for each in taught])
        except (TeacherAway, NotTaught) as error:
            self.batch = self._classroom.dismissed(self.batch, error, drop=self._drop)
            return False
        self._classroom.attended()
        return True

    @property
    def ids(self):
        return [each.id for each in self.batch]

    def _drop(self, samples, reason):
        self.dropped[reason] = [each.id for each in samples]


@pytest.mark.parametrize("mode", ["reverse_kl", "replies"])
@pytest.mark.parametrize(("chokes", "said"), [("error", "500: out of range float values"), ("silence", "timed out")])
def test_a_row_that_the_teacher_fails_on_is_dropped_after_three_tries(classroom, double, mode, chokes, said):
    double.poison, double.chokes = {POISON}, chokes
    lesson = Lesson(classroom(mode), [_poison(0), *(sample(i) for i in range(1, 12))])
    assert [lesson.tried() for _ in range(2)] == [False, False]
    assert (len(lesson.batch), lesson.dropped) == (12, {})
    assert not lesson.tried()
    [(reason, ids)] = lesson.dropped.items()
    assert reason.startswith("the teacher answers others, but failed 3 times in a row on this: ")
    assert said in reason
    assert (ids, lesson.ids) == ([0], list(range(1, 12)))
    assert lesson.tried()


def test_more_bad_rows_than_are_asked_at_once_do_not_hide_those_behind_them(classroom, double):
    double.poison = {POISON}
    lesson = Lesson(classroom(), [*(_poison(i) for i in range(8)), *(sample(i) for i in range(8, 16))])
    for _ in range(99):
        if lesson.tried():
            break
    assert lesson.ids == list(range(8, 16))


def test_only_failures_in_a_row_count(classroom, double):
    lesson = Lesson(classroom(), [_poison(0), *(sample(i) for i in range(1, 4))])
    for poison in ({POISON}, {POISON}, set(), {POISON}, {POISON}):
        double.poison = poison
        lesson.tried()
    assert (lesson.ids, lesson.dropped) == ([0, 1, 2, 3], {})


def test_a_teacher_that_answers_nothing_costs_no_row_and_is_an_alarm(classroom, double, ledger):
    lesson = Lesson(classroom(), [sample(i) for i in range(12)])
    assert lesson.tried()
    double.down = True
    assert not any(lesson.tried() for _ in range(9))
    assert ledger.alarms.all() == []
    assert not any(lesson.tried() for _ in range(3))
    [alarm] = ledger.alarms.all()
    assert (alarm.name, alarm.holds) == ("teacher_away", False)
    assert "asked 10 times" in alarm.reason
    assert "503: the engine is asleep" in alarm.reason
    double.down = False
    assert lesson.tried()
    assert (len(lesson.batch), lesson.dropped, ledger.alarms.all()) == (12, {}, [])


def test_a_row_fails_alone_only_while_the_teacher_answers_others(classroom, double):
    """It went away between two tries on which it had failed on the row, and that row is not blamed for it."""
    double.poison = {POISON}
    lesson = Lesson(classroom(), [_poison(0), *(sample(i) for i in range(1, 4))])
    assert not any(lesson.tried() for _ in range(2))
    double.down = True
    assert not any(lesson.tried() for _ in range(5))
    assert (lesson.ids, lesson.dropped) == ([0, 1, 2, 3], {})


def test_an_alarm_that_somebody_cleared_is_not_raised_again_before_the_teacher_was_there(classroom, double, ledger):
    lesson = Lesson(classroom(), [sample(0)])
    double.down = True
    for _ in range(10):
        lesson.tried()
    assert ledger.alarms.clear("teacher_away")
    lesson.tried()
    assert ledger.alarms.all() == []
    double.down = False
    assert lesson.tried()
    double.down = True
    for _ in range(10):
        lesson.tried()
    assert [alarm.name for alarm in ledger.alarms.all()] == ["teacher_away"]


@pytest.mark.parametrize("method", ["distill", "reinforce"])
def test_the_first_step_after_a_restart_clears_the_alarm(settings, ledger, double, method):
    ledger.alarms.raise_alarm(Alarm(name="teacher_away", reason="it was"))
    commit(ledger, [sample(i) for i in range(4)])
    teacher = {"distill": {"teacher_url": double.url, "teacher_model": "big"}} if method == "distill" else {}
    run(settings(algorithm={"algorithm_type": method} | teacher, trainer={"total_steps": 1}), Event())
    assert ledger.alarms.all() == []


def test_the_trainer_goes_on_without_a_row_of_no_numbers(settings, ledger, double):
    double.poison, double.chokes = {POISON}, "nan"
    commit(ledger, [_poison(0), *(sample(i) for i in range(1, 9))])
    distill = {"teacher_url": double.url, "teacher_model": "big"}
    algorithm = {"algorithm_type": "distill", "distill": distill, "mini_batches": 1}
    run(settings(algorithm=algorithm, trainer={"total_steps": 2}), Event())
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 8, State.DROPPED: 1}
    [aside] = ledger.reports.facts(BatchPolicy(), aside=5).aside
    assert aside.reason.endswith("on this: the teacher's log-probability of a token is no number")
    assert ledger.reports.imbalance() == []
