"""DPO: the loss of others on the same numbers, pairs that stay together, and a margin that grows."""

import numpy as np
import pytest
import torch

from tests.trainer.factories import sample
from tests.trainer.golden.fixtures import cases
from tests.trainer.pairwise import agrees_with_others, loss_of
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import dpo
from tuneloop.trainer.algorithms.terms import Targets, Totals
from tuneloop.trainer.batches.selection import make_pairs
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner

GOLDEN = cases("dpo")
_loss = loss_of(dpo)


def _algorithm(**options):
    return AlgorithmSettings(algorithm_type="dpo", dpo=options)


def _targets(inputs):
    """Golden rows 0 to 3 are chosen, 4 to 7 rejected."""
    return Targets(
        mask_BR=inputs["mask"],
        sampled_BR=torch.zeros(8, 9),
        reference_BR=inputs["reference"],
        signs_B=torch.tensor([1, 1, 1, 1, -1, -1, -1, -1]),
        units_B=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]),
    )


@pytest.mark.parametrize("golden", GOLDEN, ids=str)
def test_loss_and_gradient_are_those_of_others(golden):
    agrees_with_others(golden, _loss, _algorithm(**golden.settings), _targets(golden.inputs))


def test_long_replies_keep_the_sign_of_a_small_difference():
    """In float32 the sum of 4000 numbers loses a difference of 1e-4."""
    length = 4000
    logprobs = torch.full((2, length), -11.3)
    logprobs[0, 0] += 1e-4
    targets = Targets(
        mask_BR=torch.ones(2, length, dtype=torch.bool),
        sampled_BR=torch.zeros(2, length),
        reference_BR=torch.zeros(2, length),
        signs_B=torch.tensor([1, -1]),
        units_B=torch.tensor([0, 0]),
    )
    told = _loss(_algorithm(beta=1.0), targets, logprobs, Totals(2 * length, 2, 1))
    assert float(told.metrics["rewards/margins"]) == pytest.approx(1e-4, rel=0.02)
    assert float(told.metrics["rewards/accuracies"]) == 1


# With a model.


def _learner(settings, **but) -> Learner:
    dpo_settings = {"algorithm_type": "dpo", "optimizer": {"lr": 1e-3}, "mini_batches": 1}
    return snapshot.load(settings(algorithm=dpo_settings | but, buffer={"group_by": "task"}), None)


def _pairs(count=6):
    """Whoever says 1 is chosen, whoever says 2 is rejected."""
    samples = []
    for number in range(count):
        prompt = np.arange(60 + number, 64 + number, dtype=np.int32)
        for token, reward in ((1, 1.0), (2, 0.0)):
            ids = np.array([token] * (1 + number % 3), dtype=np.int32)
            logprobs = np.full(len(ids), np.nan, np.float32)  # Nobody looks at them.
            at = 2 * number + token
            but = {"id": at, "prompt_ids": prompt, "completion_ids": ids, "logprobs": logprobs, "temperature": 0.5}
            samples.append(sample(at, reward=reward, group_id=number, run_id=str(token), task_id="t", **but))
    return make_pairs(samples)[0]


def test_the_margin_grows_and_the_loss_falls(settings):
    learner = _learner(settings, mini_batches=3)
    told = [learner.step(_pairs()) for _ in range(8)]
    assert told[-1]["actor/dpo_loss"] < told[0]["actor/dpo_loss"] - 0.1
    assert told[-1]["rewards/margins"] > told[0]["rewards/margins"] + 0.3
    assert told[-1]["rewards/accuracies"] == 1
