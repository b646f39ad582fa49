"""GRPO for agents: the reward of a run's last call applies to all of its calls.

    advantage  (reward of the last call - mean of the group) / (standard deviation + 1e-6)     Trinity-RFT
    actor      the clipped loss of terms.py

`group.scale` chooses the deviation (n - 1), as in grpo.py. The last call is the last sampled one in the batch. A lone
run, and runs of a group with equal scores, have advantage 0; in Trinity-RFT a lone run's is its reward. Not
implemented: rewards of earlier calls; division by the number of calls; `std_threshold` (constant groups are dropped).
"""

from dataclasses import replace

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import Baselines, CallRewards, Prepared, RunScores, Targets


def prepare(algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines) -> Prepared:
    each_K = RunScores.of_last(algorithm, targets, calls).scale(algorithm.group.scale)
    return replace(targets, advantages_BR=calls.of_runs(each_K)), baselines
