"""GSPO: clips whole sequences instead of tokens.

    advantage  grpo.py's                                                                 arXiv 2507.18071, eq. 6
    ratio      s = exp(mean over the sequence's tokens of log r)                         eq. 7
    actor      max(-A s, -A clip(s, 1 - low, 1 + high)), the mean over sequences         eq. 5

Each token has the value s and the gradient of its own log-probability, as in GSPO-token (eq. 13 and 14); with one
advantage per sequence, as grpo.py's, the gradient equals eq. 5's. `dual_clip` bounds it as in PPO.
"""

from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import Targets, clipped_policy_loss, high_clip, require, sequence_sums


def policy_loss(
    algorithm: AlgorithmSettings, log_ratio_BR: Tensor, logprobs_BR: Tensor, targets: Targets
) -> tuple[Tensor, Tensor]:
    """Per token, the sequence's loss, and whether the clip applied."""
    mask_BR = targets.mask_BR
    means_B = sequence_sums(log_ratio_BR.detach(), mask_BR) / mask_BR.sum(1).clamp(min=1)
    of_sequence_BR = logprobs_BR - logprobs_BR.detach() + means_B.to(logprobs_BR.dtype)[:, None]
    return clipped_policy_loss(
        of_sequence_BR,
        require(targets.advantages_BR),
        low=algorithm.clip_range,
        high=high_clip(algorithm),
        dual=algorithm.dual_clip,
    )
