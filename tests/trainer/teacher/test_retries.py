"""The trainer waits for a teacher that is away, and drops samples that the teacher can never answer for."""

from threading import Event

import numpy as np
import pytest

from tests.trainer.factories import commit, sample
from tuneloop.shared.errors import SamplesRefused, TeacherAway
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.trainer.batches.batch import TokenSequence
from tuneloop.trainer.loop import run
from tuneloop.trainer.teacher.teacher import RemoteTeacher, TeacherRetries

POISON = 255


@pytest.fixture
def retries(double, settings, ledger):
    """Makes one with a teacher, and a trainer, of little patience."""

    def make(mode="reverse_kl"):
        stop = Event()
        distill = {"teacher_url": double.url, "teacher_model": "big", "mode": mode, "timeout": 0.5}
        chosen = settings(algorithm={"algorithm_type": "distill", "distill": distill}, model={"max_response_tokens": 9})
        made = TeacherRetries(chosen, ledger.alarms, stop, retry_s=0.01)
        made.teacher = RemoteTeacher(chosen, stop, pauses_s=(0.01,))
        return made

    return make


def _poison(number):
    return sample(number, prompt_ids=np.array([POISON, 3], np.int32))


class Attempts:
    """What the loop does with a batch; `dropped` are ids by the reason."""

    def __init__(self, retries, batch):
        self._retries = retries
        self.batch, self.dropped = batch, {}

    def next(self):
        """Whether it was learnt."""
        try:
            labelled = self._retries.label(self.batch)
            self._retries.teacher.score([TokenSequence.alone(each) for each in labelled])
        except (TeacherAway, SamplesRefused) as error:
            self.batch = self._retries.requeue(self.batch, error, drop=self._drop)
            return False
        self._retries.succeeded()
        return True

    @property
    def ids(self):
        return [each.id for each in self.batch]

    def _drop(self, samples, reason):
        self.dropped[reason] = [each.id for each in samples]


@pytest.mark.parametrize("mode", ["reverse_kl", "replies"])
@pytest.mark.parametrize(("chokes", "said"), [("error", "500: out of range float values"), ("silence", "timed out")])
def test_a_row_that_the_teacher_fails_on_is_dropped_after_three_tries(retries, double, mode, chokes, said):
    double.poison, double.chokes = {POISON}, chokes
    attempts = Attempts(retries(mode), [_poison(0), *(sample(i) for i in range(1, 12))])
    assert [attempts.next() for _ in range(2)] == [False, False]
    assert (len(attempts.batch), attempts.dropped) == (12, {})
    assert not attempts.next()
    [(reason, ids)] = attempts.dropped.items()
    assert reason.startswith("the teacher answers for other samples, but failed 3 times in a row on this one: ")
    assert said in reason
    assert (ids, attempts.ids) == ([0], list(range(1, 12)))
    assert attempts.next()


def test_a_teacher_that_answers_nothing_costs_no_row_and_is_an_alarm(retries, double, ledger):
    attempts = Attempts(retries(), [sample(i) for i in range(12)])
    assert attempts.next()
    double.down = True
    assert not any(attempts.next() for _ in range(9))
    assert ledger.alarms.all() == []
    assert not any(attempts.next() for _ in range(3))
    [alarm] = ledger.alarms.all()
    assert (alarm.name, alarm.holds) == ("teacher_away", False)
    assert "failed to answer for a batch 10 times" in alarm.reason
    assert "503: the engine is asleep" in alarm.reason
    double.down = False
    assert attempts.next()
    assert (len(attempts.batch), attempts.dropped, ledger.alarms.all()) == (12, {}, [])


@pytest.mark.parametrize("method", ["distill", "reinforce"])
def test_the_first_step_after_a_restart_clears_the_alarm(settings, ledger, double, method):
    ledger.alarms.raise_alarm(Alarm(name="teacher_away", reason="it was"))
    commit(ledger, [sample(i) for i in range(4)])
    teacher = {"distill": {"teacher_url": double.url, "teacher_model": "big"}} if method == "distill" else {}
    run(settings(algorithm={"algorithm_type": method} | teacher, trainer={"total_steps": 1}), Event())
    assert ledger.alarms.all() == []
