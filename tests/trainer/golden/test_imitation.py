"""Imitation against others: sft's loss of verl, TRL and transformers; what raft's algorithm 1 chooses."""

import numpy as np
import pytest
import torch

from tests.constants import section_of
from tests.trainer.factories import gradients_of, sample
from tests.trainer.golden.fixtures import cases
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import sft
from tuneloop.trainer.algorithms.terms import Targets
from tuneloop.trainer.batches.batch import assemble, collate
from tuneloop.trainer.batches.selection import imitable
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import _collate

pytestmark = pytest.mark.contract

BATCH = [sample(i) for i in range(9)]


def _loss(case, logprobs_BR, mask_BR, totals):
    targets = Targets(mask_BR=mask_BR, sampled_BR=torch.zeros_like(logprobs_BR))
    algorithm = section_of(AlgorithmSettings, {"algorithm_type": "sft"} | case.settings)
    return sft.actor_loss(algorithm, targets, logprobs_BR, torch.zeros_like(logprobs_BR), totals).value


@pytest.mark.parametrize("case", cases("sft"), ids=str)
def test_loss_and_gradient_and_each_micro_batchs_share_are_theirs(case):
    now, mask = case.inputs["logprobs"].clone().requires_grad_(), case.inputs["mask"]
    totals = Targets(mask_BR=mask, sampled_BR=now).totals
    loss = _loss(case, now, mask, totals)
    loss.backward()
    case.agrees(loss)
    case.agrees(now.grad, "grad")
    shares = [_loss(case, now[rows], mask[rows], totals) for rows in case.outputs["rows"]]
    case.agrees(torch.stack(shares), "shares")


def _ours(learner, samples):
    """Loss and gradients of one mini-batch, cut into micro-batches."""
    sequences = assemble(samples, merge=False)
    batch = _collate(sequences, tempered=learner._asks.tempered)
    targets, _ = learner._targets(sequences, batch)
    told = learner.forward_backward(batch, targets)
    return told["actor/sft_loss"], gradients_of(learner, "actor")


def _theirs(network, samples):
    """The same of transformers: labels of -100 at the prompt, a reply at a time, over the tokens of all replies."""
    items = sum(len(each.completion_ids) for each in samples)
    total = 0.0
    for each in samples:
        ids = torch.from_numpy(np.concatenate([each.prompt_ids, each.completion_ids])).long()[None]
        labels = ids.clone()
        labels[:, : len(each.prompt_ids)] = -100
        loss = network(input_ids=ids, labels=labels, num_items_in_batch=items).loss
        loss.backward()
        total += float(loss.detach())
    return total, {name: each.grad for name, each in network.named_parameters()}


def _agree(settings, ours, theirs, kind):
    learners = [snapshot.load(settings(algorithm={"algorithm_type": kind}), None) for _ in range(2)]
    assert len(collate(assemble(ours, merge=False)).lengths_B) > 1
    (loss, gradients), (other, others) = _ours(learners[0], ours), _theirs(learners[1].actor.network, theirs)
    assert loss == pytest.approx(other, abs=1e-5)
    assert max(float(each.abs().max()) for each in others.values()) > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-4, atol=1e-6)


def test_loss_and_gradients_of_a_model_are_transformers_with_labels(settings):
    """Whatever temperature the replies were sampled at."""
    assert {each.temperature for each in BATCH} == {0.7, 1.0}
    _agree(settings, BATCH, BATCH, "sft")


def test_rafts_are_those_of_the_best_reply_of_each_group(settings):
    """RAFT's algorithm 1: of the replies to each prompt, the one with the largest reward."""
    samples = [sample(i, group_id=f"g{i // 3}", reward=float((7 * i) % 9), temperature=1.0) for i in range(9)]
    options = {"algorithm_type": "raft", "sft": {"least_reward": 0.0}}
    chosen, _ = imitable(samples, section_of(AlgorithmSettings, options))
    best = [max(samples[start : start + 3], key=lambda each: each.reward) for start in (0, 3, 6)]
    _agree(settings, chosen, best, "raft")
