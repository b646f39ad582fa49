"""A teacher behind an endpoint: what it is asked, and what is made of each of its answers."""

import threading

import numpy as np
import pytest

from tests.doubles.teacher import logprob_of
from tests.trainer.factories import sample
from tuneloop.shared.errors import EnvironmentRefused, SamplesRefused, TeacherAway
from tuneloop.trainer.batches.batch import TokenSequence
from tuneloop.trainer.teacher.teacher import RemoteTeacher


@pytest.fixture
def remote(double, settings):
    """Makes the trainer's side of it."""

    def make(*, stop=None, pauses_s=(0.01, 0.01), path="", **but):
        distill = {"teacher_url": double.url + path, "teacher_model": "big", "timeout": 2.0} | but
        changed = settings(
            algorithm={"algorithm_type": "distill", "distill": distill}, model={"max_response_tokens": 9}
        )
        return RemoteTeacher(changed, stop or threading.Event(), pauses_s=pauses_s)

    return make


def _sequences(count=20):
    return [TokenSequence.alone(sample(i)) for i in range(count)]


def test_it_tells_the_log_probability_of_each_action_token(remote, double):
    sequences = _sequences()
    told = remote().score(sequences)
    assert told.shape == (20, max(len(each.ids) - each.start for each in sequences))
    for row, each in zip(told, sequences, strict=True):
        ids = each.ids.tolist()
        expected = [logprob_of(ids, at) for at in range(each.start, len(ids))]
        assert row[: len(expected)].tolist() == pytest.approx(expected)
        assert not row[len(expected) :].any()
    assert len(double.requests) == 21
    assert double.requests[-1].keys() == {"model", "prompt", "max_tokens", "temperature", "prompt_logprobs"}


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"shift": 1}, "another tokenizer"),
        ({"leaves_out": ("prompt_logprobs",)}, "as vLLM does; OpenAI's models"),
        ({"leaves_out": ("prompt_token_ids",)}, "as vLLM does; OpenAI's models"),
        ({"model": "other"}, "answers 404: The model `big` does not exist."),
        ({"fails": [400]}, "answers 400: for once"),
        ({"fails": [401]}, "answers 401: for once"),
    ],
)
def test_what_cannot_be_a_teacher_is_refused_in_a_sentence(remote, double, fault, sentence):
    for name, value in fault.items():
        setattr(double, name, value)
    with pytest.raises(EnvironmentRefused, match=r"algorithm\.distill\.teacher_url: .*" + sentence):
        remote().score(_sequences(2))


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_hiccup_is_asked_again(remote, double, status):
    teacher = remote()
    teacher.check()
    double.fails = [status, status]
    assert teacher.score(_sequences(1)).any()


def test_a_teacher_that_is_down_is_away_and_may_come_back(remote, double):
    teacher = remote()
    double.down = True
    with pytest.raises(TeacherAway, match="503: the engine is asleep"):
        teacher.score(_sequences())
    double.down = False
    assert teacher.score(_sequences()).any()


def test_a_sequence_too_long_for_the_teacher_is_refused_with_its_calls(remote, double):
    teacher = remote()
    teacher.check()
    double.refuses = 12
    sequences = _sequences()
    long = {each.calls[0].id for each in sequences if len(each.ids) > 12}
    assert 0 < len(long) < 20
    with pytest.raises(SamplesRefused) as caught:
        teacher.score(sequences)
    [(reason, ids)] = caught.value.refused.items()
    assert reason == "the teacher refuses it: This model's maximum context length is 12 tokens."
    assert set(ids) == long


def test_a_teacher_that_fails_again_and_again_is_not_asked_about_the_whole_batch(remote, double):
    """200 rows, of which it answers 4; each is asked for three times."""
    teacher = remote()
    teacher.check()
    double.poison = {255}
    bad = [sample(i, prompt_ids=np.array([255], np.int32)) for i in range(4, 200)]
    with pytest.raises(TeacherAway, match="500"):
        teacher.score([*_sequences(4), *map(TokenSequence.alone, bad)])
    assert len(double.keys) < 300


# Its replies.


def test_its_reply_takes_the_place_of_the_model_s(remote, double):
    samples = [sample(i) for i in range(5)]
    taught = remote().reply(samples)
    assert [each.completion_ids.tolist() for each in taught] == [[7, 8, 256]] * 5
    assert [each.id for each in taught] == [0, 1, 2, 3, 4]
    assert [each.prompt_ids.tolist() for each in taught] == [each.prompt_ids.tolist() for each in samples]
    asked = double.requests[-1]
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["max_tokens"]) == (1.0, 1.0, 0, 9)
    prompts = sorted(body["prompt"] for body in double.requests[1:])
    assert prompts == sorted(each.prompt_ids.tolist() for each in samples)
