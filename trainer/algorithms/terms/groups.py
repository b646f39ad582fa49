"""Runs compared with the other runs of their group: what grpo, rloo and multi_step_grpo share.

Dimension suffixes are explained in trainer/batches/batch.py; besides, K runs and G groups.
"""

from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms.policy_loss import subtract_kl_penalty
from tuneloop.trainer.algorithms.terms.targets import CallRewards, Targets

#: What is added to a standard deviation before anything is divided by it: verl's number; TRL's is 1e-4.
EPSILON = 1e-6


class RunScores(NamedTuple):
    """A score of each run, in float64, and the number of its group."""

    scores_K: Tensor
    groups_K: Tensor

    @classmethod
    def of_means(cls, algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards) -> Self:
        """The mean of the rewards of a run's calls."""
        rewards_K = sums(calls.rewards_C, calls.runs_C) / counts(calls.runs_C)
        return cls._of(rewards_K, algorithm, targets, calls)

    @classmethod
    def of_last(cls, algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards) -> Self:
        """The reward of a run's last call."""
        rewards_K = sums(torch.where(calls.last_C, calls.rewards_C, 0.0), calls.runs_C)
        return cls._of(rewards_K, algorithm, targets, calls)

    @classmethod
    def _of(cls, rewards_K: Tensor, algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards) -> Self:
        """With `kl_in: reward` a run pays for the divergence of all its tokens."""
        paid_K = sums(kl_penalties(algorithm, targets, calls), calls.runs_C)
        groups_K = torch.zeros(len(rewards_K), dtype=torch.long).index_copy(0, calls.runs_C, calls.groups_C)
        return cls(rewards_K + paid_K, groups_K)

    @property
    def sizes_K(self) -> Tensor:
        """How many runs there are in each run's group."""
        return counts(self.groups_K)[self.groups_K]

    def centre(self) -> Tensor:
        """Less the mean of the group; exactly 0 for a run that is alone, and where all of a group have one score."""
        means_G = sums(self.scores_K, self.groups_K) / counts(self.groups_K)
        first_G = torch.zeros_like(means_G).index_copy(0, self.groups_K, self.scores_K)
        unlike_G = sums((self.scores_K != first_G[self.groups_K]).double(), self.groups_K)
        return torch.where(unlike_G[self.groups_K] > 0, self.scores_K - means_G[self.groups_K], 0.0)

    def scale(self, by: Literal["group", "batch", "none"]) -> Tensor:
        """Less the mean of the group, divided by a standard deviation (n - 1): of the group or of all the scores."""
        centred_K = self.centre()
        match by:
            case "none":
                return centred_K
            case "batch":
                deviation = self.scores_K.std() if len(centred_K) > 1 else torch.tensor(1.0)
                return centred_K / (deviation + EPSILON)
            case "group":
                variance_G = sums(centred_K.square(), self.groups_K) / (counts(self.groups_K) - 1).clamp(min=1)
                return centred_K / (variance_G.sqrt()[self.groups_K] + EPSILON)


def kl_penalties(algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards) -> Tensor:
    """What each call pays, with `kl_in: reward`, for its tokens' divergence from the base model; of shape C, <= 0."""
    paid_BR = subtract_kl_penalty(algorithm, targets, torch.zeros_like(targets.sampled_BR))
    inside_BR = calls.of_BR >= 0
    nothing_C = torch.zeros(len(calls.rewards_C), dtype=torch.float64)
    return nothing_C.index_add(0, calls.of_BR[inside_BR], paid_BR[inside_BR].double())


def sums(each: Tensor, of: Tensor) -> Tensor:
    """In float64, the sum of what has each number from 0 to the largest of `of`."""
    return torch.zeros(int(of.max()) + 1, dtype=torch.float64).index_add(0, of, each.double())


def counts(of: Tensor) -> Tensor:
    """How often each number occurs."""
    return torch.bincount(of)
