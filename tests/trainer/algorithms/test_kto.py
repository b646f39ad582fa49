"""KTO: the loss of others on the same numbers, the divergence on mismatched pairs, and it learns."""

import numpy as np
import pytest
import torch

from tests.trainer.factories import sample
from tests.trainer.golden.fixtures import cases
from tests.trainer.pairwise import agrees_with_others, loss_of
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import kto
from tuneloop.trainer.algorithms.terms import CallRewards, Targets
from tuneloop.trainer.batches.batch import TokenSequence
from tuneloop.trainer.batches.selection import mismatch_replies
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import _divergence
from tuneloop.trainer.models.model import Actor

GOLDEN = cases("kto")
_loss = loss_of(kto)


def _algorithm(**options):
    return AlgorithmSettings(algorithm_type="kto", kto=options)


def _targets(inputs):
    return Targets(
        mask_BR=inputs["mask"],
        sampled_BR=torch.zeros(8, 9),
        reference_BR=inputs["reference"],
        signs_B=torch.where(inputs["desirable"], 1, -1),
        divergence=inputs["divergence"],
    )


@pytest.mark.parametrize("golden", GOLDEN, ids=str)
def test_loss_and_gradient_are_those_of_others(golden):
    agrees_with_others(golden, _loss, _algorithm(**golden.settings), _targets(golden.inputs))


def test_the_threshold_itself_is_desirable_and_the_divergence_never_negative():
    rewards = torch.tensor([0.5, 0.49, 1.0])
    calls = CallRewards(
        rewards_C=rewards,
        rows_C=torch.tensor([2, 0, 1]),
        runs_C=torch.arange(3),
        groups_C=torch.arange(3),
        last_C=torch.ones(3, dtype=torch.bool),
        tasks=("", "", ""),
        of_BR=torch.arange(3)[:, None],
        ends_BR=torch.ones(3, 1, dtype=torch.bool),
    )
    targets = Targets(
        mask_BR=torch.ones(3, 1, dtype=torch.bool), sampled_BR=torch.zeros(3, 1), divergence=torch.tensor(-0.3)
    )
    targets, _ = kto.prepare(_algorithm(), targets, calls, {})
    assert targets.signs_B.tolist() == [-1, 1, 1]
    assert targets.divergence == 0


def test_each_prompt_gets_the_next_one_s_reply():
    samples = [sample(i) for i in range(3)]
    strangers = mismatch_replies(samples)
    assert [each.prompt_ids.tolist() for each in strangers] == [each.prompt_ids.tolist() for each in samples]
    assert [each.completion_ids.tolist() for each in strangers] == [
        samples[i].completion_ids.tolist() for i in (1, 2, 0)
    ]
    assert mismatch_replies(samples[:1]) == []


def test_no_prompt_gets_a_reply_that_the_model_could_not_have_given(settings, monkeypatch):
    long, short = np.arange(200, dtype=np.int32), np.arange(5, dtype=np.int32)
    replies = [
        sample(number, prompt_ids=prompt, completion_ids=said, logprobs=np.zeros(len(said), np.float32))
        for number, (prompt, said) in enumerate([(long, short), (short, long), (short, short)])
    ]
    strangers = mismatch_replies(replies, longest=256)
    assert [(len(each.prompt_ids), len(each.completion_ids)) for each in strangers] == [(5, 5), (5, 5)]
    assert mismatch_replies(replies, longest=9) == []
    logprobs, read = Actor.logprobs, []

    def noted(self, batch, *more):
        read.append(int(batch.lengths_B.max()))
        return logprobs(self, batch, *more)

    monkeypatch.setattr(Actor, "logprobs", noted)
    for model in ({}, {"max_model_len": 206}, {"max_model_len": 9}):  # the model's own configuration says 256
        learner = snapshot.load(settings(algorithm={"algorithm_type": "kto"}, model=model), None)
        assert learner.step(replies)["kl"] == pytest.approx(0, abs=1e-4)
        assert max(read) == 205


# With a model.


def _learner(settings, **but):
    kto_settings = {"algorithm_type": "kto", "optimizer": {"lr": 1e-3}, "mini_batches": 1}
    return snapshot.load(settings(algorithm=kto_settings | but), None)


def _replies(count=12):
    """Whoever says 1 did well, whoever says 2 did not."""
    samples = []
    for number in range(count):
        token = 1 + number % 2
        ids = np.array([token] * (1 + number % 3), dtype=np.int32)
        logprobs = np.full(len(ids), np.nan, np.float32)  # Nobody looks at them.
        prompt = np.arange(60 + number, 64 + number, dtype=np.int32)
        but = {"prompt_ids": prompt, "completion_ids": ids, "logprobs": logprobs, "temperature": 0.5}
        samples.append(sample(number, reward=float(token == 1), **but))
    return samples


def test_the_divergence_is_that_of_the_mismatched_replies(settings):
    learner = _learner(settings)
    learner.step(_replies())
    sequences = [TokenSequence.alone(each) for each in _replies()]
    with torch.no_grad():
        found = float(_divergence(learner, sequences))
        assert float(_divergence(learner, sequences[:1])) == 0
    expected = []
    for number, each in enumerate(_replies()):
        ids = [*each.prompt_ids.tolist(), *_replies()[(number + 1) % 12].completion_ids.tolist()]
        for network, sign in ((learner.actor.network, 1), (learner.reference.network, -1)):
            logprobs = network(input_ids=torch.tensor([ids])).logits[0, 3:-1].log_softmax(-1)
            expected.append(sign * float(logprobs.gather(1, torch.tensor(ids[4:])[:, None]).detach().sum()))
    assert found == pytest.approx(sum(expected) / 12, abs=1e-4)
    assert found != 0


def test_the_margin_grows_and_the_loss_falls(settings):
    learner = _learner(settings, mini_batches=2)
    told = [learner.step(_replies()) for _ in range(8)]
    assert told[-1]["actor/kto_loss"] < told[0]["actor/kto_loss"] - 0.02
    assert told[-1]["rewards/chosen"] > 0 > told[-1]["rewards/rejected"]
    assert told[-1]["rewards/margins"] > told[0]["rewards/margins"] + 0.3


def test_calls_of_a_run_are_judged_one_by_one(settings):
    """The second call goes on from the first; merged they would have one sign for two rewards."""
    first = sample(0, reward=0.0, task_id="t", run_id="r")
    longer = np.concatenate([first.prompt_ids, first.completion_ids, np.array([9], np.int32)])
    second = sample(1, reward=1.0, task_id="t", run_id="r", prompt_ids=longer)
    assert _learner(settings).step([first, second])["perf/merged"] == 1
