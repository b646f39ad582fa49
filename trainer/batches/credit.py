"""Credit: what each call of a batch is rewarded with, and where in its sequence that is paid.

call         its own reward, at its end: what came after it does not count
trajectory   the reward of its run's last call, paid once, at the end of the sequence
discounted   the reward of its run's last call, times `turn_discount` for each call after it, at its end
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tuneloop.shared.experience import Sample
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms.moments import Baselines, mean_and_std, update_moments
from tuneloop.trainer.algorithms.terms.targets import CallRewards
from tuneloop.trainer.batches.batch import Batch
from tuneloop.trainer.batches.sequences import TokenSequence, run_of, when_sampled

_REWARDS = "rewards"

#: Added to a deviation that is divided by.
_LEAST = 1e-6


def calls_of(
    algorithm: AlgorithmSettings,
    sequences: Sequence[TokenSequence],
    batch: Batch,
    baselines: Baselines,
    limit: int | None,
) -> tuple[CallRewards, Baselines]:
    """The calls of a batch: credited, then clipped, punished for their length, and shifted and scaled.

    `limit`: the most tokens that a reply may have, if known.
    """
    calls = [call for sequence in sequences for call in sequence.calls]
    runs: dict[tuple[str, ...], list[int]] = {}
    for number in sorted(range(len(calls)), key=lambda number: when_sampled(calls[number])):
        runs.setdefault(run_of(calls[number]), []).append(number)
    own = np.array([call.reward for call in calls])
    credited, last, run_numbers = own.copy(), np.zeros(len(calls), bool), np.zeros(len(calls), np.int64)
    for number, members in enumerate(runs.values()):
        run_numbers[members] = number
        last[members[-1]] = True
        if algorithm.credit != "call":
            discount = algorithm.turn_discount if algorithm.credit == "discounted" else 1.0
            later = np.arange(len(members))[::-1]
            credited[members] = own[members[-1]] * discount**later
    low, high = algorithm.reward_clip or (-np.inf, np.inf)
    judged = credited.clip(low, high) - [_overlong(algorithm, call, limit) for call in calls]
    rewards_C, baselines = _normalize(algorithm, torch.from_numpy(judged), baselines)
    return CallRewards(
        rewards_C=rewards_C.float(),
        rows_C=torch.repeat_interleave(torch.tensor([len(sequence.calls) for sequence in sequences])),
        runs_C=torch.from_numpy(run_numbers),
        groups_C=_group_numbers([call.group_id if call.group_id is not None else -1 - call.id for call in calls]),
        last_C=torch.from_numpy(last),
        tasks=tuple(f"{call.tenant}/{call.task_id}" if call.task_id is not None else "" for call in calls),
        of_BR=batch.calls_BR,
        ends_BR=_ends(batch, whole=algorithm.credit == "trajectory"),
    ), baselines


def _overlong(algorithm: AlgorithmSettings, call: Sample, limit: int | None) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), as what is taken off."""
    if not algorithm.overlong.buffer or limit is None:
        return 0.0
    beyond = len(call.completion_ids) - (limit - algorithm.overlong.buffer)
    return algorithm.overlong.penalty * min(max(beyond / algorithm.overlong.buffer, 0.0), 1.0)


def _normalize(algorithm: AlgorithmSettings, rewards_C: Tensor, baselines: Baselines) -> tuple[Tensor, Baselines]:
    """In float64: rewards may be large, and differ little."""
    match algorithm.reward_normalization:
        case "none":
            return rewards_C, baselines
        case "batch":
            # Not over their mean: that of equal rewards may differ from them in the last digit.
            apart_C = rewards_C - rewards_C[0]
            apart_C = apart_C - apart_C.mean()
            return apart_C / (apart_C.square().mean().sqrt() + _LEAST), baselines
        case "running":
            seen = update_moments(baselines.get(_REWARDS), rewards_C, decay=algorithm.baseline.decay)
            mean, deviation = mean_and_std(seen)
            return (rewards_C - mean) / (deviation + _LEAST), {**baselines, _REWARDS: seen}


def _group_numbers(names: Sequence[int]) -> Tensor:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def _ends(batch: Batch, *, whole: bool) -> Tensor:
    """The last token of each call, or, of `whole` sequences, the last token that is learnt from."""
    calls_BR = batch.calls_BR
    positions_R = torch.arange(calls_BR.shape[1])
    if not whole:
        # A call may have holes, where it was redacted. The last number is of the tokens that are of no call.
        last_C = torch.full((int(calls_BR.max()) + 2,), -1)
        last_C.scatter_reduce_(0, calls_BR.flatten() % len(last_C), positions_R.expand_as(calls_BR).flatten(), "amax")
        return batch.mask_BR & (positions_R == last_C[calls_BR])
    final_B1 = torch.where(batch.mask_BR, positions_R, -1).max(1, keepdim=True).values
    return positions_R == final_B1
