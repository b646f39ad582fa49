"""GRPO for agents: a run is judged by its last call alone, and all of its calls learn from that.

    advantage  (reward of the last call - mean of the group) / (standard deviation + 1e-6)     Trinity-RFT
    actor      the clipped loss of terms.py

`group.scale` chooses the deviation (n - 1), as in grpo.py. A run's last call is the last one sampled of those in the
batch. A run that is alone in its group, and all runs of a group with one score, have advantage 0; in Trinity-RFT the
advantage of a lone run is its reward.

Left out: rewards of the calls before the last; division by the number of calls; `std_threshold` (constant
groups are left out before).
"""

from dataclasses import replace

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import Baselines, CallRewards, RunScores, Targets


def prepare(
    algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines
) -> tuple[Targets, Baselines]:
    """The advantages of a batch of whole groups."""
    each_K = RunScores.of_last(algorithm, targets, calls).scale(algorithm.group.scale)
    return replace(targets, advantages_BR=calls.of_runs(each_K)), baselines
