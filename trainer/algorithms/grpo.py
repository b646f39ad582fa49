"""GRPO: the other runs of the task are the baseline.

    advantage  (score - mean of the group) / (standard deviation + 1e-6)                 arXiv 2402.03300, section 4.1.2
    actor      the clipped loss of terms.py                                              eq. 3

A run's score is the mean of its calls' rewards (each of which `credit` decides); every token of all its calls has the
run's advantage. The deviation (n - 1) is that of the group, or, by `group.scale`, of the batch's scores (2508.08221),
or none at all (Dr. GRPO, 2503.20783, section 3.2). DAPO (2503.14476, eq. 8) is this page with `clip_range_high: 0.28`,
`loss_agg_mode: token-mean`, constant groups left out (section 3.2) and `overlong` (eq. 13); the paper's own average is
`seq-mean-token-mean`, Dr. GRPO's `seq-mean-token-sum-norm`, its divergence k3 (eq. 4).

A run that is alone in its group, and all runs of a group with one score, have advantage 0.

Left out: process rewards; the iterated reward model; whitening over tokens; DAPO's sampling of more groups in
the place of constant ones.
"""

from dataclasses import replace

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import Baselines, CallRewards, RunScores, Targets


def prepare(
    algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines
) -> tuple[Targets, Baselines]:
    """The advantages of a batch of whole groups."""
    each_K = RunScores.of_means(algorithm, targets, calls).scale(algorithm.group.scale)
    return replace(targets, advantages_BR=calls.of_runs(each_K)), baselines
