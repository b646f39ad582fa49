"""RLOO, REINFORCE leave-one-out: the baseline is the mean over the task's other runs.

    advantage  score - mean of the other runs' scores                                    arXiv 2402.14740, section 2.3
               = n / (n - 1) (score - mean of the group), of n runs
    actor      the clipped loss of terms.py

A run's score is the mean of its calls' rewards; each token of the run has the run's advantage. The baseline is
independent of the run, so the gradient is unbiased. A lone run, and runs of a group with equal scores, have advantage
0. Not implemented: one ratio per reply, the action in the paper and in TRL (tokens are clipped separately, as in verl;
with `loss_agg_mode: seq-mean-token-sum` the first update is equal); a standard deviation (`group.scale`); whitening.
"""

from dataclasses import replace

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import Baselines, CallRewards, Prepared, RunScores, Targets


def prepare(algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines) -> Prepared:
    scores = RunScores.of_means(algorithm, targets, calls)
    each_K = scores.centre() * scores.sizes_K / (scores.sizes_K - 1).clamp(min=1)
    return replace(targets, advantages_BR=calls.of_runs(each_K)), baselines
