"""Credit: what each call of a batch is rewarded with, and where in its sequence that is paid.

call         its own reward, at its end: what came after it does not count
trajectory   the reward of its run's last call, paid once, at the end of the sequence
discounted   the reward of its run's last call, times `turn_discount` for each call after it, at its end
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.config_algorithm import Algorithm
from shared.experience import Sample
from trainer.algorithms.moments import Baselines, Moments, standard, updated
from trainer.algorithms.targets import Calls
from trainer.batch import Batch
from trainer.sequences import TokenSequence, run_of

_REWARDS = "rewards"


def calls_of(
    algorithm: Algorithm, sequences: Sequence[TokenSequence], batch: Batch, baselines: Baselines, limit: int | None
) -> tuple[Calls, Baselines]:
    """The calls of a batch, with their credit. `limit`: the most tokens that a reply may have, if known."""
    calls = [call for sequence in sequences for call in sequence.calls]
    runs: dict[tuple[str, ...], list[int]] = {}
    for number in sorted(range(len(calls)), key=lambda number: calls[number].id):
        runs.setdefault(run_of(calls[number]), []).append(number)
    own = np.array([_judged(algorithm, call, limit) for call in calls])
    credited, last, run_numbers = own.copy(), np.zeros(len(calls), bool), np.zeros(len(calls), np.int64)
    for number, members in enumerate(runs.values()):
        run_numbers[members] = number
        last[members[-1]] = True
        if algorithm.credit != "call":
            discount = algorithm.turn_discount if algorithm.credit == "discounted" else 1.0
            later = np.arange(len(members))[::-1]
            credited[members] = own[members[-1]] * discount**later
    rewards_C, baselines = _normalized(algorithm, torch.from_numpy(credited).float(), baselines)
    return Calls(
        rewards_C=rewards_C,
        rows_C=torch.repeat_interleave(torch.tensor([len(sequence.calls) for sequence in sequences])),
        runs_C=torch.from_numpy(run_numbers),
        groups_C=_numbered([call.group_id if call.group_id is not None else -1 - call.id for call in calls]),
        last_C=torch.from_numpy(last),
        tasks=tuple(f"{call.tenant}/{call.task_id}" if call.task_id is not None else "" for call in calls),
        of_BR=batch.calls_BR,
        ends_BR=_ends(batch, whole=algorithm.credit == "trajectory"),
    ), baselines


def _judged(algorithm: Algorithm, call: Sample, limit: int | None) -> float:
    """The reward, less DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), clipped."""
    reward = call.reward
    if algorithm.overlong.buffer and limit is not None:
        beyond = len(call.completion_ids) - (limit - algorithm.overlong.buffer)
        reward -= algorithm.overlong.penalty * min(max(beyond / algorithm.overlong.buffer, 0.0), 1.0)
    low, high = algorithm.reward_clip or (-np.inf, np.inf)
    return float(min(max(reward, low), high))


def _normalized(algorithm: Algorithm, rewards_C: Tensor, baselines: Baselines) -> tuple[Tensor, Baselines]:
    match algorithm.reward_normalization:
        case "none":
            return rewards_C, baselines
        case "batch":
            seen = Moments(float(rewards_C.mean()), float(rewards_C.square().mean()), 1.0)
        case "running":
            seen = updated(baselines.get(_REWARDS), rewards_C, decay=algorithm.baseline.decay)
            baselines = {**baselines, _REWARDS: seen}
    mean, deviation = standard(seen)
    return (rewards_C - mean) / (deviation + 1e-6), baselines


def _numbered(names: Sequence[int]) -> Tensor:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def _ends(batch: Batch, *, whole: bool) -> Tensor:
    """The last token of each call, or, of `whole` sequences, the last token that is learnt from."""
    calls_BR = batch.calls_BR
    next_BR = torch.full_like(calls_BR, -1)
    next_BR[:, :-1] = calls_BR[:, 1:]
    last_BR = batch.mask_BR & (next_BR != calls_BR)
    if not whole:
        return last_BR
    positions_R = torch.arange(calls_BR.shape[1])
    final_B1 = torch.where(batch.mask_BR, positions_R, -1).max(1, keepdim=True).values
    return positions_R == final_B1
