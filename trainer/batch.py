"""Batches: leased samples as tensors, which of them cannot be trained on, and their division into micro-batches.

Dimensions, written as suffixes of tensors throughout the trainer:
    B replies   T positions of prompt and reply   R reply tokens   N all reply tokens, reply after reply
    D width of the model   V vocabulary
T and R are padded on the right. A reply 4 5 to the prompt 7 8 9, padded to T = 6 and R = 3:
    ids_BT       7 8 9 4 5 0
    predicts_BT  . . x x . .     the positions whose next token is a reply token
    replies_BR   4 5 0
    mask_BR      x x .
    rewards_BR   0 r 0           the reward is paid with the last token
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.experience import Float32s, Int32s, Sample

#: Larger rewards are refused: their square is not safe in float32, and one of them would spoil its whole batch.
MAX_REWARD = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some replies as tensors. `lengths_B` counts the tokens of prompt and reply together."""

    ids_BT: Tensor
    predicts_BT: Tensor
    replies_BR: Tensor
    mask_BR: Tensor
    sampled_BR: Tensor
    rewards_BR: Tensor
    temperatures_B: Tensor
    lengths_B: Tensor

    @property
    def tokens(self) -> int:
        """How many reply tokens there are."""
        return int(self.mask_BR.sum())

    def rows(self, index_B: Tensor) -> "Batch":
        """The replies `index_B`, without the padding that they do not need."""
        lengths_B, mask_BR = self.lengths_B[index_B], self.mask_BR[index_B]
        positions, replies = int(lengths_B.max()), int(mask_BR.sum(1).max())
        return Batch(
            ids_BT=self.ids_BT[index_B, :positions],
            predicts_BT=self.predicts_BT[index_B, :positions],
            replies_BR=self.replies_BR[index_B, :replies],
            mask_BR=mask_BR[:, :replies],
            sampled_BR=self.sampled_BR[index_B, :replies],
            rewards_BR=self.rewards_BR[index_B, :replies],
            temperatures_B=self.temperatures_B[index_B],
            lengths_B=lengths_B,
        )

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        return Batch(**{name: getattr(self, name).to(device) for name in self.__slots__})


def collate(samples: Sequence[Sample]) -> Batch:
    """The samples as one batch on the CPU. None of them may be `untrainable`."""
    prompts = torch.tensor([len(sample.prompt_ids) for sample in samples])
    replies = torch.tensor([len(sample.completion_ids) for sample in samples])
    t_T, r_R = torch.arange(int((prompts + replies).max())), torch.arange(int(replies.max()))
    first_B1, last_B1 = prompts[:, None] - 1, (prompts + replies)[:, None] - 2
    rewards_B1 = torch.tensor([[sample.reward] for sample in samples], dtype=torch.float32)
    return Batch(
        ids_BT=_padded([np.concatenate([sample.prompt_ids, sample.completion_ids]) for sample in samples]),
        predicts_BT=(t_T >= first_B1) & (t_T <= last_B1),
        replies_BR=_padded([sample.completion_ids for sample in samples]),
        mask_BR=r_R < replies[:, None],
        sampled_BR=_padded([sample.logprobs for sample in samples]).float(),
        rewards_BR=torch.where(r_R == replies[:, None] - 1, rewards_B1, 0.0),
        temperatures_B=torch.tensor([sample.temperature for sample in samples], dtype=torch.float32),
        lengths_B=prompts + replies,
    )


def untrainable(sample: Sample, *, vocabulary: int) -> str | None:
    """Why the sample must not reach the loss, if so; the sentence becomes the reason of its row."""
    ids = np.concatenate([sample.prompt_ids, sample.completion_ids])
    rules = {
        "the reply has no tokens": len(sample.completion_ids) > 0,
        "the prompt has no tokens, so the reply's first one was predicted from nothing": len(sample.prompt_ids) > 0,
        "the reply has not one log-probability per token": len(sample.logprobs) == len(sample.completion_ids),
        "a log-probability is not finite": bool(np.isfinite(sample.logprobs).all()),
        f"the reward is not a number within ±{MAX_REWARD:g}": abs(sample.reward) <= MAX_REWARD,
        "the reply was chosen at temperature 0, not sampled": 0 < sample.temperature < float("inf"),
        f"a token is outside the model's vocabulary of {vocabulary}": bool(((ids >= 0) & (ids < vocabulary)).all()),
    }
    return next((reason for reason, fulfilled in rules.items() if not fulfilled), None)


def micro_batches(lengths_B: Tensor, budget: int) -> list[Tensor]:
    """The replies' indices in groups that, padded, have at most `budget` positions; a longer reply stands alone.

    Like goes with like: groups are made from the longest reply down, so that little is padded.
    """
    groups: list[list[int]] = []
    width = 0
    for row in torch.argsort(lengths_B, descending=True, stable=True).tolist():
        if not groups or (len(groups[-1]) + 1) * width > budget:
            groups.append([])
            width = int(lengths_B[row])
        groups[-1].append(row)
    return [torch.tensor(group) for group in groups]


def spread(flat_N: Tensor, mask_BR: Tensor) -> Tensor:
    """One number per reply token, put back in its place; 0 in the padding."""
    return flat_N.new_zeros(mask_BR.shape).masked_scatter(mask_BR, flat_N)


def _padded(rows: Sequence[Int32s] | Sequence[Float32s]) -> Tensor:
    tensors = [torch.from_numpy(np.array(row)) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    return padded if padded.is_floating_point() else padded.long()
