"""What a step says of itself: how much of its batch counted, and how far the policy is from others."""

import numpy as np
import pytest
import torch

from tests.trainer.factories import sample
from tuneloop.trainer.checkpoints import snapshot


def sampled_by(learner, number, **but):
    """A sample with the log-probabilities that the learner gives it."""
    each = sample(number, temperature=1.0, **but)
    logprobs = learner.logprobs([*each.prompt_ids.tolist(), *each.completion_ids.tolist()])
    return sample(number, temperature=1.0, logprobs=np.float32(logprobs[-len(each.completion_ids) :]), **but)


def improbable(number, **but):
    """A sample that was nearly impossible when it was sampled."""
    length = len(sample(number).completion_ids)
    return sample(number, logprobs=np.full(length, -15.0, np.float32), **but)


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.actor.network.state_dict().items()}


def test_where_every_token_is_masked_it_is_told_and_no_weight_moves(settings):
    """Not by AdamW's memory of the step before either."""
    masked = {"algorithm_type": "reinforce", "kl_coef": 0.0, "off_policy": {"correction": "mask"}, "mini_batches": 1}
    learner = snapshot.load(settings(algorithm=masked), None)
    told = learner.step([sampled_by(learner, i, reward=float(i % 2)) for i in range(8)])
    assert (told["off_policy/outside"], told["critic/advantages/zero"]) == (0, 0)
    before = weights(learner)
    told = learner.step([improbable(i, reward=float(i % 2)) for i in range(8)])
    assert (told["off_policy/outside"], told["critic/advantages/zero"], told["actor/grad_norm"]) == (1, 1, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())
    assert learner.steps == 2


def test_the_mismatch_of_the_very_weights_own_replies_is_told_apart_from_staleness(settings):
    learner = snapshot.load(settings(algorithm={"kl_coef": 0.0, "mini_batches": 1}), None)
    fresh = [sampled_by(learner, i, version_min=7, version_max=7) for i in range(4)]
    stale = [improbable(i, version_min=3, version_max=7) for i in range(4, 8)]
    told = learner.step([*fresh, *stale], version=7)
    assert told["mismatch_kl/mean"] > 0.1
    assert told["mismatch_kl/fresh"] == pytest.approx(0.0, abs=1e-6)
    assert "mismatch_kl/fresh" not in learner.step(stale, version=8)
    assert "mismatch_kl/fresh" not in learner.step(fresh)
