"""A teacher on this machine, and the loop whose teacher is away."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.doubles.teacher import teaching
from tests.trainer.factories import commit, sample
from tuneloop.shared.errors import EnvironmentRefused, SamplesRefused
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules
from tuneloop.trainer.batches.batch import TokenSequence, assemble
from tuneloop.trainer.loop import run
from tuneloop.trainer.teacher.teacher import LocalTeacher


def _settings(settings, **distill):
    algorithm = {"algorithm_type": "distill", "distill": distill, "kl_coef": 0.0, "mini_batches": 1}
    return settings(algorithm=algorithm, model={"max_response_tokens": 6})


@pytest.fixture
def teacher(settings, opinionated):
    return LocalTeacher(_settings(settings, teacher_path=str(opinionated)), opinionated)


def test_its_log_probabilities_are_those_of_temperature_1(teacher, opinionated):
    first = sample(0, task_id="t", run_id="r", temperature=0.7)
    longer = np.concatenate([first.prompt_ids, first.completion_ids, np.array([9, 9], np.int32)])
    second = sample(1, task_id="t", run_id="r", prompt_ids=longer, temperature=0.7)
    sequences = [*assemble([first, second], merge=True), *(TokenSequence.alone(sample(i)) for i in range(2, 9))]
    told = teacher.score(sequences)
    network = AutoModelForCausalLM.from_pretrained(opinionated)
    for row, each in zip(told, sequences, strict=True):
        ids = torch.from_numpy(each.ids).long()
        with torch.no_grad():
            logprobs = network(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        expected = torch.where(torch.from_numpy(each.of[1:] >= 0), logprobs, 0.0)[each.start - 1 :]
        torch.testing.assert_close(row[: len(expected)], expected, rtol=0, atol=1e-4)
        assert not row[len(expected) :].any()


def test_a_teacher_with_other_words_is_refused(settings, opinionated, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(opinionated, folder)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.add_special_tokens(["<other>"])
    words.save(str(folder / "tokenizer.json"))
    teacher = LocalTeacher(_settings(settings, teacher_path=str(folder)), folder)
    with pytest.raises(EnvironmentRefused, match=r"teacher_path: its tokenizer is another.*<other>.*None here"):
        teacher.check()


def _answers(teacher, samples):
    """One by one, since most replies of so small a model are cut off."""
    found = {}
    for each in samples:
        try:
            [found[each.id]] = teacher.reply([each])
        except SamplesRefused as error:
            found[each.id] = next(iter(error.refused))
    return found


def test_it_replies_until_the_end_of_a_turn_and_always_the_same(settings, base, tmp_path):
    """It has learnt to say a token below 9, or the end of a turn."""
    folder = tmp_path / "brief"
    shutil.copytree(base, folder)
    network = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(0)
    for _ in range(60):
        says = torch.tensor([*range(9), 256, 256, 256])[torch.randint(12, (16, 16), generator=random)]
        network(input_ids=says, labels=says).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(folder)
    chosen = settings(
        algorithm={"algorithm_type": "distill", "distill": {"teacher_path": str(folder), "mode": "replies"}},
        model={"max_response_tokens": 3},
    )
    teacher = LocalTeacher(chosen, folder)
    samples = [sample(i, prompt_ids=np.arange(1, 2 + i % 6, dtype=np.int32)) for i in range(12)]
    found = _answers(teacher, samples)
    said = {number: each for number, each in found.items() if not isinstance(each, str)}
    assert 3 <= len(said) < 12
    for number, each in said.items():
        ids = each.completion_ids.tolist()
        assert ids[-1] in {256, 257}
        assert not {256, 257} & set(ids[:-1])
        assert each.prompt_ids.tolist() == samples[number].prompt_ids.tolist()
        assert len(each.logprobs) == len(ids)
    reasons = {each for each in found.values() if isinstance(each, str)}
    assert "the teacher's reply was cut off at 3 tokens" in reasons
    again = _answers(teacher, list(reversed(samples)))
    for number, each in said.items():
        assert again[number].completion_ids.tolist() == each.completion_ids.tolist()


# The loop.


def _trained_while(chosen, meanwhile):
    """Run a trainer to its last step; `meanwhile` is called beside it."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(run, chosen, stop)
        try:
            meanwhile(trainer)
            trainer.result(60)
        finally:
            stop.set()


def test_a_batch_waits_for_a_teacher_that_is_away_and_nothing_is_lost(settings, ledger, base, capfd):
    commit(ledger, [sample(i) for i in range(8)])
    with teaching(base, down=True) as double:
        distill = {"teacher_url": double.url, "teacher_model": "big"}
        algorithm = {"algorithm_type": "distill", "distill": distill, "mini_batches": 1}
        chosen = settings(algorithm=algorithm, trainer={"total_steps": 2})
        wait = threading.Event().wait

        def meanwhile(trainer):
            while not trainer.done() and len(double.keys) < 5:
                wait(0.02)
            assert ledger.reports.counts()[State.DROPPED] == 0
            assert ledger.reports.counts()[State.TRAINED] == 0
            assert not trainer.done()
            double.down = False

        _trained_while(chosen, meanwhile)
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 8}
    assert ledger.reports.imbalance() == []
    logged = "".join(capfd.readouterr())
    assert logged.count("teacher_away") == 1
    assert logged.count("teacher_back") == 1


def test_what_the_teacher_refuses_is_dropped_with_its_reason_and_another_takes_its_place(settings, ledger, base):
    samples = [sample(i) for i in range(12)]
    too_long = sample(12, prompt_ids=np.arange(100, dtype=np.int32))
    commit(ledger, [too_long, *samples])
    with teaching(base, refuses=90) as double:
        distill = {"teacher_url": double.url, "teacher_model": "big"}
        algorithm = {"algorithm_type": "distill", "distill": distill, "mini_batches": 1}
        run(settings(algorithm=algorithm, trainer={"total_steps": 3}), threading.Event())
    counts = ledger.reports.counts()
    assert (counts[State.TRAINED], counts[State.DROPPED], counts[State.COMMITTED]) == (12, 1, 0)
    [drop] = ledger.reports.facts(BatchRules(), drops=5).drops
    assert drop.reason == "the teacher refuses it: This model's maximum context length is 90 tokens."
