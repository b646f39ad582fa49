"""Distillation: the advantage is the teacher's distance, and the student comes nearer."""

import math

import numpy as np
import pytest
import torch

from tests.constants import section_of
from tests.trainer.conftest import VOCABULARY
from tests.trainer.factories import sample
from tuneloop.shared.ledger.ledger import BatchRules
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import distill
from tuneloop.trainer.algorithms.terms import Targets
from tuneloop.trainer.batches.selection import untrainable
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.teacher.teacher import LocalTeacher

MASK = torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
NORMAL = torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
SAMPLED, TEACHER = -NORMAL[0].abs() - 0.1, -NORMAL[1].abs() - 0.1


def _algorithm(**but):
    section = {"algorithm_type": "distill", "distill": {"teacher_path": "/t"}, "kl_coef": 0.0} | but
    return section_of(AlgorithmSettings, section)


def _loss(algorithm, logprobs_BR, *, teacher_BR=TEACHER, mask_BR=MASK, totals=None):
    targets = Targets(mask_BR=mask_BR, sampled_BR=SAMPLED[: len(mask_BR)], teacher_BR=teacher_BR)
    entropy_BR = torch.zeros_like(logprobs_BR)
    return distill.actor_loss(algorithm, targets, logprobs_BR, entropy_BR, totals or targets.totals)


@pytest.mark.parametrize("said", [-math.inf, -9999.0])
def test_a_token_that_the_teacher_rules_out_counts_20_nats(said):
    teacher = TEACHER.clone()
    teacher[0, 0] = said
    logprobs = SAMPLED.clone().requires_grad_()
    _loss(_algorithm(), logprobs, teacher_BR=teacher).value.backward()
    assert float(logprobs.grad[0, 0]) == pytest.approx(20 / 9)


def test_stale_replies_are_weighted_by_the_clipped_ratio():
    """Far from what sampled them, with the teacher in favour: the clip holds the gradient back."""
    logprobs = (SAMPLED + 1).requires_grad_()
    _loss(_algorithm(), logprobs, teacher_BR=SAMPLED + 2).value.backward()
    assert not logprobs.grad.any()


# With models.

PROMPT = np.array([60, 61, 62], dtype=np.int32)


def _distribution(network):
    with torch.no_grad():
        return network(input_ids=torch.from_numpy(PROMPT).long()[None]).logits[0, -1].log_softmax(0)


def _divergence(learner, teacher):
    student, wanted = _distribution(learner.actor.network), _distribution(teacher._actor.network)
    return float((student.exp() * (student - wanted)).sum())


def test_the_student_comes_nearer_to_a_local_teacher(settings, opinionated):
    """KL(student || teacher), exact over the vocabulary, falls to a fraction on the student's own replies."""
    lively = {"algorithm_type": "distill", "optimizer": {"lr": 3e-3}, "kl_coef": 0.0, "mini_batches": 1}
    changed = settings(
        algorithm=lively | {"distill": {"teacher_path": str(opinionated)}}, trainer={"micro_batch_tokens": 4096}
    )
    learner = snapshot.load(changed, None)
    assert learner.critic is None
    learner.teacher = teacher = LocalTeacher(changed, opinionated)
    random = np.random.default_rng(0)
    before, told = _divergence(learner, teacher), []
    for _ in range(60):
        logprobs = _distribution(learner.actor.network).numpy()
        weights = np.exp(logprobs.astype(np.float64))
        batch = [
            sample(
                i,
                prompt_ids=PROMPT,
                completion_ids=np.array([token], np.int32),
                logprobs=logprobs[[token]],
                reward=0.0,
                temperature=1.0,
            )
            for i, token in enumerate(random.choice(len(weights), size=64, p=weights / weights.sum()))
        ]
        told.append(learner.step(batch)["actor/teacher_kl"])
    after = _divergence(learner, teacher)
    assert before > 1
    assert after < 0.3 * before
    assert told[0] == pytest.approx(before, rel=0.3)


@pytest.mark.parametrize(("mode", "taken"), [("replies", True), ("reverse_kl", False)])
def test_only_who_imitates_learns_from_replies_that_are_no_samples(settings, mode, taken):
    distill = {"algorithm_type": "distill", "distill": {"teacher_path": "/t", "mode": mode}}
    chosen = settings(algorithm=distill)
    assert BatchRules.of(chosen).any_reply == taken
    greedy = sample(0, temperature=0.0, logprobs=np.full_like(sample(0).logprobs, np.nan))
    reason = untrainable(greedy, chosen.algorithm, vocabulary=VOCABULARY)
    assert (reason is None) == taken
