"""GRPO: the baseline is the mean over the task's runs.

    advantage  (score - mean of the group) / (standard deviation + 1e-6)                 arXiv 2402.03300, section 4.1.2
    actor      the clipped loss of terms.py                                              eq. 3

A run's score is the mean of its calls' rewards (see `credit`); each token of the run has the run's advantage. The
deviation (n - 1) is the group's, or by `group.scale` the batch's (2508.08221) or none (Dr. GRPO, 2503.20783, section
3.2). `loss_agg_mode` is `seq-mean-token-mean` in the paper, `seq-mean-token-sum-norm` in Dr. GRPO; the paper's
divergence is k3 (eq. 4). A lone run, and runs of a group with equal scores, have advantage 0. Not implemented: process
rewards; the iterated reward model; whitening over tokens.

DAPO (2503.14476, eq. 8) is this module with `clip_range_high: 0.28`, `loss_agg_mode: token-mean`, `kl_coef: 0`, without
groups of equal scores (section 3.2: trainer/batches/selection.py), and with `overlong.buffer` as its soft punishment
(eq. 13). Not implemented: sampling replacements for dropped groups.
"""

from dataclasses import replace

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import Baselines, CallRewards, Prepared, RunScores, Targets


def prepare(algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines) -> Prepared:
    each_K = RunScores.of_means(algorithm, targets, calls).scale(algorithm.group.scale)
    return replace(targets, advantages_BR=calls.of_runs(each_K)), baselines
