"""What a loss compares the models with: constants of one step, aligned with the reply tokens.

Dimension suffixes are explained in trainer/batch.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Log-probabilities as sampled and of the reference, the critic's old values, and what was made of the rewards."""

    mask_BR: Tensor
    sampled_BR: Tensor
    reference_BR: Tensor | None
    values_BR: Tensor
    advantages_BR: Tensor
    returns_BR: Tensor

    def rows(self, index_B: Tensor, like_BR: Tensor) -> "Targets":
        """The replies `index_B`, cut to the width and put on the device of `like_BR`."""

        def cut(all_BR: Tensor) -> Tensor:
            return all_BR[index_B, : like_BR.shape[1]].to(like_BR.device)

        return Targets(
            mask_BR=cut(self.mask_BR),
            sampled_BR=cut(self.sampled_BR),
            reference_BR=None if self.reference_BR is None else cut(self.reference_BR),
            values_BR=cut(self.values_BR),
            advantages_BR=cut(self.advantages_BR),
            returns_BR=cut(self.returns_BR),
        )


class Loss(NamedTuple):
    """A micro-batch's share in a mini-batch's loss and metrics: summed over the micro-batches they are whole."""

    value: Tensor
    metrics: Mapping[str, Tensor]
