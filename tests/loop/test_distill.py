"""A student of a real vLLM: the teacher's numbers are transformers', and the student comes nearer to it."""

from pathlib import Path
from statistics import mean
from threading import Event

import httpx
import numpy as np
import pytest
import torch
from pydantic import SecretStr

from examples.sums.model import build, save, tokenizer
from tests.loop.harness.bare_engine import KEY, MODEL, put_weights, url_of
from tests.loop.harness.oracle import Oracle
from tests.loop.harness.services import make_model, write_settings
from tests.trainer.factories import sample
from tuneloop.shared.errors import EnvironmentRefused, SamplesRefused
from tuneloop.shared.experience import Sample
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import TokenSequence
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.teacher.teacher import RemoteTeacher

pytestmark = pytest.mark.vllm

PROMPT = np.array(tokenizer().encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"), np.int32)


@pytest.fixture(scope="module")
def opinionated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than the student, which is sure of what it says."""
    folder = tmp_path_factory.mktemp("opinionated")
    network, words = build(1)
    with torch.no_grad():
        network.lm_head.weight.mul_(8)
    save(network, words, folder)
    return folder


@pytest.fixture(scope="module")
def teacher_url(bare_engine: httpx.Client, as_it_was: None, opinionated: Path) -> str:
    put_weights(bare_engine, opinionated)
    return url_of(bare_engine)


@pytest.fixture
def settings(teacher_url: str, tmp_path: Path) -> Settings:
    distill = {"teacher_url": teacher_url, "teacher_model": MODEL, "teacher_key": KEY}
    algorithm = {"algorithm_type": "distill", "distill": distill, "kl_coef": 0.0, "optimizer": {"lr": 3e-3}}
    model = make_model(tmp_path / "student")
    return load_settings(write_settings(tmp_path, model, mode="train", algorithm=algorithm))


def said_by(learner: Learner, random: torch.Generator, *, replies: int, length: int) -> list[Sample]:
    """Replies that the student samples, with their log-probabilities."""
    ids_BT = torch.from_numpy(PROMPT).long().expand(replies, -1)
    logprobs = []
    for _ in range(length):
        with torch.no_grad():
            next_BV = learner.actor.network(input_ids=ids_BT).logits[:, -1].log_softmax(-1)
        chosen_B1 = torch.multinomial(next_BV.exp(), 1, generator=random)
        ids_BT = torch.cat([ids_BT, chosen_B1], 1)
        logprobs.append(next_BV.gather(1, chosen_B1))
    numbers = torch.cat(logprobs, 1).numpy()
    tails = ids_BT[:, len(PROMPT) :].numpy().astype(np.int32)
    return [
        sample(i, prompt_ids=PROMPT, completion_ids=tails[i], logprobs=numbers[i], temperature=1.0, reward=0.0)
        for i in range(replies)
    ]


def divergence(learner: Learner, oracle: Oracle) -> float:
    """KL(student || teacher) of the first token, over the whole vocabulary."""
    ids = torch.from_numpy(PROMPT).long()[None]
    with torch.no_grad():
        student = learner.actor.network(input_ids=ids).logits[0, -1].log_softmax(-1)
        teacher = oracle._model(input_ids=ids).logits[0, -1].log_softmax(-1)
    return float((student.exp() * (student - teacher)).sum())


def test_the_teacher_s_numbers_are_those_of_transformers(settings: Settings, opinionated: Path) -> None:
    teacher, oracle = RemoteTeacher(settings, Event()), Oracle(opinionated)
    samples = [sample(i, temperature=0.7) for i in range(12)]
    told = teacher.score([TokenSequence.alone(each) for each in samples])
    for row, each in zip(told, samples, strict=True):
        expected = oracle.logprobs(each.prompt_ids.tolist(), each.completion_ids.tolist())
        assert row[: len(expected)].tolist() == pytest.approx(expected, abs=1e-4)


def test_the_student_comes_nearer_to_it(settings: Settings, opinionated: Path) -> None:
    learner, oracle = snapshot.load(settings, None), Oracle(opinionated)
    learner.teacher = RemoteTeacher(settings, Event())
    random, told = torch.Generator().manual_seed(0), []
    before = divergence(learner, oracle)
    for _ in range(40):
        told.append(learner.step(said_by(learner, random, replies=24, length=3))["actor/teacher_kl"])
    assert before > 0.5
    assert divergence(learner, oracle) < 0.5 * before
    assert mean(told[-8:]) < 0.6 * mean(told[:2])


def test_its_replies_can_be_had_and_what_does_not_fit_is_refused(settings: Settings) -> None:
    teacher = RemoteTeacher(settings, Event())
    taught, reasons = [], set()
    for number in range(8):  # Untrained, it may speak to its limit, which is refused.
        try:
            taught += teacher.reply([sample(number, prompt_ids=PROMPT)])
        except SamplesRefused as error:
            reasons |= error.refused.keys()
    assert reasons <= {"the teacher's reply was cut off at 16 tokens"}
    assert all(each.completion_ids[-1] == tokenizer().eos_token_id for each in taught)
    long = sample(9, prompt_ids=np.resize(PROMPT, 5_000))
    with pytest.raises(
        SamplesRefused, match="the teacher refuses it: This model's maximum context length is 4096 tokens"
    ):
        teacher.reply([long])
    with pytest.raises(
        SamplesRefused, match="the teacher refuses it: This model's maximum context length is 4096 tokens"
    ):
        teacher.score([TokenSequence.alone(long)])


def test_a_wrong_key_is_refused_in_a_sentence(settings: Settings) -> None:
    distill = settings.algorithm.distill.model_copy(update={"teacher_key": SecretStr("wrong")})
    wrong = settings.model_copy(update={"algorithm": settings.algorithm.model_copy(update={"distill": distill})})
    with pytest.raises(EnvironmentRefused, match=r"teacher_url: .* answers 401: Unauthorized"):
        RemoteTeacher(wrong, Event()).check()
