"""Calls and targets for tests of algorithms, without a model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tuneloop.trainer.algorithms.terms import CallRewards, Targets


def calls(
    rewards: Tensor | Sequence[float],
    *,
    runs: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    tasks: Sequence[str] | None = None,
    of_BR: Tensor | None = None,
) -> CallRewards:
    """Calls in the order in which they were sampled; by default each is a run and a row of one token of its own."""
    rewards_C = torch.as_tensor(rewards)
    count = len(rewards_C)
    runs_C = torch.arange(count) if runs is None else torch.as_tensor(runs)
    of_BR = torch.arange(count)[:, None] if of_BR is None else of_BR
    places_R = torch.arange(of_BR.shape[1])
    last_BR = torch.stack([torch.where(of_BR == call, places_R, -1).amax() for call in range(count)])[of_BR]
    return CallRewards(
        rewards_C=rewards_C,
        rows_C=torch.tensor([int((of_BR == call).any(1).nonzero()[0, 0]) for call in range(count)]),
        runs_C=runs_C,
        groups_C=torch.zeros(count, dtype=torch.long) if groups is None else torch.as_tensor(groups),
        last_C=torch.tensor([not bool((runs_C[call + 1 :] == runs_C[call]).any()) for call in range(count)]),
        tasks=("",) * count if tasks is None else tuple(tasks),
        of_BR=of_BR,
        ends_BR=(of_BR >= 0) & (places_R == last_BR),
    )


def targets(of: CallRewards, **more: Tensor) -> Targets:
    """Targets for the calls' tokens, in the precision of their rewards."""
    mask_BR = of.of_BR >= 0
    sampled_BR = torch.zeros(mask_BR.shape, dtype=of.rewards_C.dtype)
    return Targets(**{"mask_BR": mask_BR, "sampled_BR": sampled_BR} | more)


def alone(mask_BR: Tensor, rewards_B: Tensor) -> CallRewards:
    """A call a row, whose tokens are those of the mask."""
    return calls(rewards_B, of_BR=torch.where(mask_BR, torch.arange(len(mask_BR))[:, None], -1))
