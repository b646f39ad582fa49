"""Credit: what each call of a batch is rewarded with, and where in its sequence that is paid.

call         its own reward, at its end: what came after it does not count
trajectory   the reward of its run's last call, paid once, at the end of the sequence
discounted   the reward of its run's last call, times `turn_discount` for each call after it, at its end
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms.targets import CallRewards
from tuneloop.trainer.batches.batch import Batch
from tuneloop.trainer.batches.sequences import TokenSequence, run_of, when_sampled


def calls_of(
    algorithm: AlgorithmSettings, sequences: Sequence[TokenSequence], batch: Batch, limit: int | None
) -> CallRewards:
    """The calls of a batch: credited, then punished for their length.

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
    groups = [call.group_id if call.group_id is not None else -1 - call.id for call in calls]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    judged, soft = credited.copy(), algorithm.overlong.buffer
    if soft and limit is not None:
        # DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).
        beyond = np.array([len(call.completion_ids) for call in calls]) - (limit - soft)
        judged -= algorithm.overlong.penalty * np.clip(beyond / soft, 0.0, 1.0)
    return CallRewards(
        rewards_C=torch.from_numpy(judged).float(),
        rows_C=torch.repeat_interleave(torch.tensor([len(sequence.calls) for sequence in sequences])),
        runs_C=torch.from_numpy(run_numbers),
        groups_C=torch.tensor([numbers[name] for name in groups]),
        last_C=torch.from_numpy(last),
        tasks=tuple(f"{call.tenant}/{call.task_id}" if call.task_id is not None else "" for call in calls),
        of_BR=batch.calls_BR,
        ends_BR=_ends(batch, whole=algorithm.credit == "trajectory"),
    )


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
