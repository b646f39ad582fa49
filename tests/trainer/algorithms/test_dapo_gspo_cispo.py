"""DAPO, GSPO and CISPO against their papers' formulas, written out in plain Python, and their gradients."""

import math

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import ALGORITHMS
from tuneloop.trainer.algorithms.terms import Targets

#: Two groups of two replies: their advantages, and log-ratios now over sampled, token by token.
ADVANTAGES = [1.0, -1.0, 0.5, -0.5]
LOG_RATIOS = [[0.4, -0.1, 0.3], [-0.9, 0.2], [0.0002, 0.0003, -0.0001, 0.0], [0.35]]
SAMPLED = [[-1.0, -2.0, -0.5], [-0.3, -1.2], [-0.7, -0.1, -2.5, -1.0], [-0.9]]


def clip(ratio, low, high):
    return min(max(ratio, 1 - low), 1 + high)


def dapo(log_ratios, *, low=0.2, high=0.28):
    """Eq. 8 of 2503.14476: over all tokens, with two clips."""
    ratios = [[math.exp(each) for each in row] for row in log_ratios]
    each = [min(r * a, clip(r, low, high) * a) for a, row in zip(ADVANTAGES, ratios, strict=True) for r in row]
    return -sum(each) / len(each)


def gspo(log_ratios, *, low=3e-4, high=4e-4):
    """Eq. 5 and 7 of 2507.18071: a sequence's ratio is the geometric mean of its tokens'."""
    ratios = [math.exp(sum(row) / len(row)) for row in log_ratios]
    each = [min(s * a, clip(s, low, high) * a) for a, s in zip(ADVANTAGES, ratios, strict=True)]
    return -sum(each) / len(each)


def cispo(log_ratios, *, weights, high=0.28):
    """Eq. 4 and 5 of 2506.13585, whose weights carry no gradient."""
    each = [
        min(math.exp(of), 1 + high) * a * (now + sampled)
        for a, row, ofs, said in zip(ADVANTAGES, log_ratios, weights, SAMPLED, strict=True)
        for now, of, sampled in zip(row, ofs, said, strict=True)
    ]
    return -sum(each) / len(each)


def padded(rows):
    return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def ours(kind):
    algorithm = AlgorithmSettings(algorithm_type=kind, dual_clip=None, off_policy={"proximal": "sampled"})
    mask_BR = padded([[1.0] * len(row) for row in SAMPLED]) > 0
    targets = Targets(
        mask_BR=mask_BR, sampled_BR=padded(SAMPLED), advantages_BR=torch.tensor(ADVANTAGES)[:, None] * mask_BR
    )
    now_BR = (padded(LOG_RATIOS) + padded(SAMPLED)).requires_grad_()
    loss = ALGORITHMS[kind].actor_loss(algorithm, targets, now_BR, torch.zeros_like(now_BR), targets.totals).value
    loss.backward()
    return loss.item(), [row[: len(said)].tolist() for row, said in zip(now_BR.grad, SAMPLED, strict=True)]


FORMULAS = {"dapo": dapo, "gspo": gspo, "cispo": lambda rows: cispo(rows, weights=LOG_RATIOS)}


@pytest.mark.parametrize("kind", FORMULAS)
def test_the_loss_and_its_gradient_are_the_papers(kind):
    loss, gradient = ours(kind)
    assert loss == pytest.approx(FORMULAS[kind](LOG_RATIOS), rel=1e-6)
    step = 1e-7
    for row, said in enumerate(LOG_RATIOS):
        for place in range(len(said)):
            moved = [[*each] for each in LOG_RATIOS]
            moved[row][place] += step
            after = FORMULAS[kind](moved)
            moved[row][place] -= 2 * step
            slope = (after - FORMULAS[kind](moved)) / (2 * step)
            assert gradient[row][place] == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_what_each_clips():
    """DAPO drops tokens one by one, GSPO whole sequences, and CISPO no token at all."""
    dropped = {kind: [[each == 0 for each in row] for row in ours(kind)[1]] for kind in FORMULAS}
    assert dropped["dapo"] == [[True, False, True], [True, False], [False] * 4, [False]]
    assert dropped["gspo"] == [[True] * 3, [True] * 2, [False] * 4, [False]]
    assert not any(map(any, dropped["cispo"]))


def test_the_papers_numbers_are_defaults_that_settings_change():
    found = AlgorithmSettings(algorithm_type="gspo", clip_range_high=None)
    assert (found.clip_range, found.clip_range_high, found.loss_agg_mode) == (3e-4, None, "seq-mean-token-mean")
    assert found.off_policy.proximal == "recomputed"
    mine = AlgorithmSettings(algorithm_type="gspo", off_policy={"correction": "mask"}).off_policy
    assert (mine.proximal, mine.correction) == ("recomputed", "mask")
    assert AlgorithmSettings(algorithm_type="dapo").kl_coef == 0
    assert AlgorithmSettings(algorithm_type="dapo", kl_coef=0.1).kl_coef == 0.1
    assert AlgorithmSettings(algorithm_type="cispo", dual_clip=None).unbounded is None
    assert AlgorithmSettings().clip_range_high is None
