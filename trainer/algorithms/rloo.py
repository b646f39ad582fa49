"""RLOO, REINFORCE leave-one-out: the mean of the task's other runs is the baseline.

    advantage  score - mean of the other runs' scores                                    arXiv 2402.14740, section 2.3
               = n / (n - 1) (score - mean of the group), of n runs
    actor      the clipped loss of terms.py

A run's score is the mean of its calls' rewards; every token of all its calls has the run's advantage. The baseline does
not depend on the run, so that the estimate of the gradient has no bias. A run that is alone in its group, and all runs
of a group with one score, have advantage 0.

Left out: one ratio for the whole reply (a reply is one action in the paper and in TRL; here each token is clipped by
itself, as in verl; with `loss_agg_mode: seq-mean-token-sum` the first update is the same); division by a standard
deviation (`group.scale` is not looked at); whitening.
"""

from dataclasses import replace

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import Baselines, CallRewards, RunScores, Targets


def prepare(
    algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines
) -> tuple[Targets, Baselines]:
    """The advantages of a batch of whole groups."""
    scores = RunScores.of_means(algorithm, targets, calls)
    others_K = (scores.sizes_K - 1).clamp(min=1)
    each_K = scores.centre() * scores.sizes_K / others_K
    return replace(targets, advantages_BR=calls.of_runs(each_K)), baselines
