"""What the methods that compare whole replies with the base model share.

Dimension suffixes are explained in trainer/batches/batch.py.
"""

import torch
from torch import Tensor

from tuneloop.trainer.algorithms.terms.targets import Targets, require


def sequence_sums(each_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """The sum over each sequence's action tokens, in float64: float32 loses the sign of small differences."""
    return torch.where(mask_BR, each_BR, 0.0).double().sum(1)


def log_ratios(targets: Targets, logprobs_BR: Tensor) -> Tensor:
    """Of each sequence, log(policy / base model), of shape B in float64."""
    return sequence_sums(logprobs_BR, targets.mask_BR) - sequence_sums(require(targets.reference_BR), targets.mask_BR)
