"""CISPO: clips the importance weight, so that each token keeps its gradient.

    advantage  grpo.py's                                                                 arXiv 2506.13585, section 3.1
    actor      -stop(clip(r, 1 - low, 1 + high)) A log policy(token), over all tokens    eq. 4 and 5

The paper sets no lower bound (`clip_range: 1`) and tunes the upper one. Not implemented: masking tokens by the sign of
their advantage (eq. 7), which gives PPO; `dual_clip`, since the weight is bounded.
"""

from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import MAX_LOG_RATIO, Targets, high_clip, require


def policy_loss(
    algorithm: AlgorithmSettings, log_ratio_BR: Tensor, logprobs_BR: Tensor, targets: Targets
) -> tuple[Tensor, Tensor]:
    """The loss per token, and whether its weight was clipped."""
    ratio_BR = log_ratio_BR.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights_BR = ratio_BR.clamp(1 - algorithm.clip_range, 1 + high_clip(algorithm))
    return -weights_BR * require(targets.advantages_BR) * logprobs_BR, weights_BR != ratio_BR
