"""Importance weights between what sampled a reply and the weights at the start of the step that learns from it.

The two differ by staleness (the reply was sampled some versions ago) and by the engine's arithmetic. The weight of a
token is w = exp(start - sampled), and

    truncate    min(w, high)                                        TIS, fengyao.notion.site/off-policy-rl
    mask        0 outside [low, high], else w                       MIS, IcePop

With `proximal: sampled` PPO's own ratio is the weight already, and a second one would count it twice: then `mask` gives
1 and 0, and there is nothing to truncate. With `recomputed` the weight stands beside a ratio against the start:
decoupled PPO (arXiv 2505.24298, eq. 5).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tuneloop.shared.settings.algorithm import OffPolicySettings
from tuneloop.trainer.algorithms.terms.estimators import MAX_LOG_RATIO


def needs_start(options: OffPolicySettings) -> bool:
    """Whether the log-probabilities at the start of the step are looked at."""
    return options.proximal == "recomputed" or options.correction == "mask"


def importance_weights(
    options: OffPolicySettings, start_BR: Tensor, sampled_BR: Tensor, mask_BR: Tensor
) -> tuple[Tensor, Mapping[str, float]]:
    """The weight of each token, 0 outside the mask, and what can be said of them."""
    log_ratio_BR = torch.where(mask_BR, start_BR - sampled_BR, 0.0)
    ratio_BR = log_ratio_BR.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    within_BR = (ratio_BR >= options.low) & (ratio_BR <= options.high)
    weights_BR = ratio_BR if options.proximal == "recomputed" else torch.ones_like(ratio_BR)
    match options.correction:
        case "truncate":
            weights_BR = weights_BR.clamp(max=options.high)
        case "mask":
            weights_BR = torch.where(within_BR, weights_BR, 0.0)
        case "none":
            weights_BR = torch.ones_like(ratio_BR)
    weights_BR = torch.where(mask_BR, weights_BR, 0.0)
    weights_N = weights_BR[mask_BR]
    squares = weights_N.square().sum()
    # Kish's, as a share of the tokens.
    size = weights_N.sum().square() / squares / len(weights_N) if squares > 0 else 0.0
    return weights_BR, {
        "off_policy/weight_mean": float(ratio_BR[mask_BR].mean()),
        "off_policy/weight_max": float(ratio_BR[mask_BR].max()),
        "off_policy/outside": float(1 - within_BR[mask_BR].float().mean()),
        "off_policy/effective_sample_size": float(size),
    }
